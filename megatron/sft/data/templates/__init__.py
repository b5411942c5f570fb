"""Chat templates: a conversation as text, and which characters of it are trained."""
