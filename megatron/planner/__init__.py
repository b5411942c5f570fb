"""What packing gains, from lengths alone and without a GPU; README.md has the map."""
