"""The data path of one global batch: load, gather, decide, move, broadcast, pack."""
