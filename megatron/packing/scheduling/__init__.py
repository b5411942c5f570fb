"""Lengths -> which rank and microbatch each sequence goes to: pure, in exact integers."""
