"""pure. The worst of `default` over the lower bound on other seeds than that of schedule.py, and in which batches.

    OMP_NUM_THREADS=1 python examples/benchmarks/schedule_seeds.py 301 320    writes results/schedule_seeds.md

Some 20 seconds a seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from schedule import MODES, bound_beside, time_of, unshaped
from schedule_cases import Case, cases

RESULTS = Path(__file__).parent / "results" / "schedule_seeds.md"

ASKED = {"dp": 1.015, "pipeline of 8 stages": 1.11, "sync": 1.05}
"""Where a batch takes more times its bound it is listed, and where ranks meet a closer bound is looked for."""
SIZES, RANKS = (64, 256, 1024, 8192, 100_000), (1, 2, 8, 64, 512, 4096)


def ratio(case: Case, mode: str, seed: int) -> float:
    """Modelled time over the bound."""
    request = case.request(MODES[mode], seed)
    time = time_of(request, unshaped(request))
    return time / bound_beside(request, time, ASKED[mode])


def main() -> None:
    """Write a row for each seed, and the batches above what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    options = parser.parse_args()
    if not 0 <= options.first <= options.last:
        parser.error(f"seeds go from 0 up, from the first to the last, but are {options.first} to {options.last}")
    rows, above, num_batches = [], [], 0
    for seed in range(options.first, options.last + 1):
        worst = dict.fromkeys(MODES, 1.0)
        for case in cases(SIZES, RANKS, True):
            for mode in MODES:
                found = ratio(case, mode, seed)
                worst[mode] = max(worst[mode], found)
                num_batches += 1
                if found > ASKED[mode]:
                    fields = (case.distribution, f"{case.size:,} on {case.num_ranks:,}", case.capacity_factor)
                    listed = [str(seed), mode, f"{found:.3f}", *map(str, fields), str(case.multiple)]
                    above.append("| " + " | ".join(listed) + " |")
        rows.append("| " + " | ".join([str(seed), *(f"{worst[mode]:.3f}" for mode in MODES)]) + " |")
        print(rows[-1], flush=True)
    command = f"OMP_NUM_THREADS=1 python examples/benchmarks/schedule_seeds.py {options.first} {options.last}"
    lines = ["# The worst of `default` on other seeds", "", "```", command, "```", ""]
    lines += [f"Modelled time over the lower bound; {len(above)} of {num_batches:,} batches are above what is asked:"]
    lines += [", ".join(f"{mode} {asked}" for mode, asked in ASKED.items()) + ".", ""]
    lines += ["| seed | " + " | ".join(MODES) + " |", "|---|---|---|---|", *rows, ""]
    lines += [
        "| seed | mode | over the bound | lengths | sequences on ranks | capacity, times the longest | multiple |"
    ]
    lines += ["|---|---|---|---|---|---|---|", *above, ""]
    RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
