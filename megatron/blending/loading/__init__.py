"""What users begin and end with: data sets by path, loaders over ranks and workers, their state."""
