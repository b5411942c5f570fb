"""tensor. `python -m megatron.packing.doctor`: the doctor from a checkout, without the trainer."""

from __future__ import annotations

import sys

from megatron.packing.doctor.command import run_doctor
from megatron.packing.flags import FlagError

if __name__ == "__main__":
    PROGRAM = "python -m megatron.packing.doctor"
    try:
        sys.exit(run_doctor(sys.argv[1:], PROGRAM))
    except (FlagError, ValueError, OSError) as failure:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        sys.exit(130)
