"""The trainer: options in, a trained model and its metrics out. README.md has the map, `pretrain_sft.py` the story."""
