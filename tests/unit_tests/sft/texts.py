"""A text as a line of a file, and as it comes back from a sample."""

import json


def text_line(text, **fields):
    return json.dumps({"text": text, **fields})


def text_of(sample):
    return bytes(int(token) for token in sample.tokens if token < 256).decode()
