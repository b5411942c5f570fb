"""Samples without data, to train and to measure: their lengths as asked for."""
