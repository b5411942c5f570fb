"""The options of a run, a file per group; `megatron.sft.options.config` puts the groups
together."""
