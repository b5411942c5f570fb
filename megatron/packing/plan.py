"""pure. The planner's command: `python -m megatron.packing.plan lengths.csv --dp 64 --pp 4 --cp 2`, without a GPU.

Only the name is here, where users look for it. What reads files and flags is in `sft.planner`, which of all this room
only this module may import; and none imports this one. `compare`, `advice` and `step_picture` are the planner as
functions.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Print schedulers side by side, advice, and draw pictures; exit status 2 and one line for a user's mistake."""
    from megatron.sft.planner import plan

    try:
        plan(sys.argv[1:])
    except ValueError as failure:
        print(f"plan: error: {' '.join(str(failure).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
