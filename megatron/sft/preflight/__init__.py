"""Checks of a run before its first step, which `--dry-run` runs alone."""
