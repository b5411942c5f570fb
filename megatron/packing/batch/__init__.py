"""pure and tensor. Samples from a user's iterator to padded microbatches, all through one table of
columns (`columns`).
"""
