"""The trainer: options in, a trained model and its metrics out.

`run.py` is a run from the command line to the report, `training/train.py` its loop. README.md lists
all files in reading order.
"""
