"""pure. Writes the metrics of a run, and reports its results: `megatron-sft report RUN_DIR`."""
