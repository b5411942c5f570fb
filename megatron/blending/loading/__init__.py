"""Sources with weights, worker processes, and the loader of chunks."""
