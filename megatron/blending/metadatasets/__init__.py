"""Metadatasets as energon's users write them: YAML -> a tree of values."""
