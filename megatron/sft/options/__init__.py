"""The options of pretrain_sft.py, a file per group; `megatron.sft.config` puts the groups together."""
