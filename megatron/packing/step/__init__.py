"""The road of one global batch: draw, gather, decide, tell, move, pack."""
