"""pure. Runs `megatron.planner.calibrate` under the name where users look for it:

python -m megatron.packing.calibrate --config run.yaml --vocab-size 50257 --output pack_cost.json
"""

from __future__ import annotations


def main() -> None:
    """Measure packs of a model on the device at hand and fit the pack cost to them."""
    from megatron.planner.calibrate import main as calibrate

    calibrate()


if __name__ == "__main__":
    main()
