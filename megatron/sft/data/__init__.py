"""Records in, samples out: chats, mock data, tokenizers, the stream of a run.

A run calls `datasets.build_datasets`, which opens sources (`chats`), tokenizes (`chat_encoder`,
`tokenizer`) and cuts splits (`splits`). `stream.SampleStream` then yields a rank's samples.
"""
