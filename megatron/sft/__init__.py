"""The trainer: options in, a trained model and its metrics out. `pretrain_sft.py` tells the story, README.md the map."""
