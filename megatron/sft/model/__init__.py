"""The model as a rank holds it: built, run forward, saved and loaded; megatron-core on CPU."""
