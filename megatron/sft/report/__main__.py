"""pure. Runs the report: `python -m megatron.sft.report RUN_DIR`."""

from megatron.sft.report.report import main

if __name__ == "__main__":
    main()
