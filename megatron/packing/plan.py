"""pure. The old place of `megatron-sft plan`, which works for one release.

Only the two commands of this package know packages above it, and nothing imports them.
"""

from __future__ import annotations


def main() -> None:
    """Prints schedulers side by side, advice, and draws pictures."""
    from megatron.sft.commands.moved import run_moved

    run_moved("megatron.packing.plan", "plan")


if __name__ == "__main__":
    main()
