"""Chat templates: render a conversation as text, and find the characters that are trained."""
