"""pure. Metrics of a run as files, and what it achieved: `python -m megatron.sft.report
RUN_DIR`."""
