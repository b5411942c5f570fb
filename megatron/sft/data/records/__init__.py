"""Reads the content of records: conversations with their turns and answers, text, or token ids.

`formats.read_record` recognises the format and returns the content, one of the classes in
`content`. `messages` reads turns, `answers` turns that branch, and `turns` makes sequences of them.
"""
