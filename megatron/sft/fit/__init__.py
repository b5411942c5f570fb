"""Memory of a run before a GPU is rented: the trainer's own code runs on tensors without memory,
and the bytes that they would take are counted.
"""
