"""pure. The old place of `megatron-sft calibrate`, which works for one release."""

from __future__ import annotations


def main() -> None:
    """Measures packs of a model on this device and fits the pack cost to them."""
    from megatron.sft.commands.moved import run_moved

    run_moved("megatron.packing.calibrate", "calibrate")


if __name__ == "__main__":
    main()
