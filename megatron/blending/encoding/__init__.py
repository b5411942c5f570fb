"""A record -> a sample -> a batch: field maps, cookers, task encoders, collation."""
