"""Files and folders as they lie on disk: (source, index) -> record; and what writes them."""
