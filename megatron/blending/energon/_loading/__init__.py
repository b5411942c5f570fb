"""Loaders of streams in which samples are packed, batched or left out; their state."""
