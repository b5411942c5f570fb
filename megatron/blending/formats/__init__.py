"""Formats of data files and folders: each is a `RecordSource`, a sequence of records by index.

`sources.open_source` opens a file by its suffix, `prepared.webdataset.open_webdataset` a folder of
tar shards. `record` defines the interface, `files` reads bytes, local or remote.
"""
