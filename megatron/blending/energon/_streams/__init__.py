"""Nodes that collect samples: batches, packs, groups."""
