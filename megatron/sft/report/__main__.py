"""pure. The old place of `megatron-sft report`, which works for one release."""

from megatron.sft.commands.moved import run_moved

if __name__ == "__main__":
    run_moved("megatron.sft.report", "report")
