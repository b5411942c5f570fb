"""Metadatasets: YAML files that name sources of data and mix them, as energon's users write them.

metadataset_file   one file, checked key by key
metadataset        files that name one another, read as one tree
tree               the values of that tree: sources, blends, joins
records            the records of a source in it
"""
