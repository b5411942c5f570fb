"""The options of pretrain_sft.py, a file per group; `megatron.sft.options.config` puts the groups together."""
