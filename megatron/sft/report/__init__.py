"""pure. Metrics of a run as files, and what it achieved: `megatron-sft report
RUN_DIR`."""
