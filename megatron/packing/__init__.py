"""Samples in, packed (THD) microbatches out. Knows no files and no model's weights.

Two modules are for users: `data_schedule` (wrap_dataloader, as Megatron-LM calls it) and `plugin`
(the hook in a training script of one's own). README.md has the map.
"""
