"""What is blended, as energon's users write it down: YAML -> a tree of values."""
