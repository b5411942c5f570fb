"""Checkpoints of a run: what is in one, written and read by all ranks, in a folder of them."""
