"""The values of a step: samples as they come and travel, the layout of packs, the plan of a rank,
statistics.
"""
