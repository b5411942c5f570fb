"""Records in, samples out: chats, mock data, tokenizers, the stream of a run."""
