"""A record and what it says: a conversation with its turns and answers, text, or token ids."""
