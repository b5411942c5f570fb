"""Reads quantized tensors of a HuggingFace folder as the values that they stand for.

config.json       methods (the kinds that are read, refusals of others by name)
headers           pairs (codes and scales become one tensor)
values            fp8, int4 and mxfp4 (one kind of codes each), scales (of blocks), slices
"""
