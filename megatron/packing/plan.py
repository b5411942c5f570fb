"""pure. Runs the planner under the name where users look for it: `python -m megatron.packing.plan
lengths.csv --dp 64`.

The planner itself is `megatron.planner`; how lengths are read from files, chats and mock data is
the trainer's knowledge. Only the two commands of this package know packages above it, and nothing
imports them.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Print schedulers side by side, advice, and draw pictures; exit status 2 and one line for a
    user's mistake.
    """
    from megatron.planner.plan import plan
    from megatron.sft.data.length_sources import lengths_from

    try:
        plan(sys.argv[1:], lengths_from)
    except ValueError as failure:
        print(f"plan: error: {' '.join(str(failure).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
