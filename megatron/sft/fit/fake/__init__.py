"""One rank of a world of any size on tensors without memory, as on CUDA where memory differs."""
