"""Streams made of streams: which sample comes next, as a function of its position."""
