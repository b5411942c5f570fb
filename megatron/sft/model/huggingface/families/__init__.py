"""HuggingFace families (`model_type`), one small file each; see `family` and `registry`."""
