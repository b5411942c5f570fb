"""Attention of packs, rotary embeddings and linear attention: all that mixes tokens."""
