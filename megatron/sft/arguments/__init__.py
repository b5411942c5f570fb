"""Command line -> options, with what the folder of a model says of them."""
