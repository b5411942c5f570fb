"""Parallel layouts of a model: their modelled times, the search for the fastest, and its page."""
