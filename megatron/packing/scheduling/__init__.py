"""pure. Lengths -> which rank and microbatch each sequence goes to. README.md is the map."""
