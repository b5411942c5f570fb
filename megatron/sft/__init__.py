"""The trainer: options in, a trained model and its metrics out. README.md has the map,
`__main__.py` the story.
"""
