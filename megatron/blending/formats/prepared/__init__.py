"""Folders of tar shards with the index files beside them, as energon prepares them."""
