"""A text as a line of a file, and as it comes back from a sample."""

import json


def text_line(text, **fields):
    return json.dumps({"text": text, **fields})


def text_of(tokens):
    return bytes(int(token) for token in tokens if token < 256).decode()
