"""pure. From results to names, as data: the rows of the decision table."""
