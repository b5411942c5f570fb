"""Schedules side by side, advice and pictures, from lengths alone."""
