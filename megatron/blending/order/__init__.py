"""The order of a stream, as pure functions: (seed, node, epoch, position) -> which source, which
record.
"""
