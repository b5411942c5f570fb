"""A HuggingFace folder <-> options and parameters of the model, in any layout."""
