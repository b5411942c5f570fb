"""pure. Packed against padded: the same samples, model and processes, in turn.

    python examples/benchmarks/packed_vs_padded.py --config examples/tiny_chat/config.yaml --steps 12 --rounds 3

Runs pretrain_sft.py with and without --sequence-packing, one after the other, `rounds` times, and prints real tokens
per second (median step, the first two left out) and the tokens computed for each real one. Absolute speed depends on
the machine; the ratio is what packing gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WARMUP_STEPS = 2


def run(config: str, num_processes: int, steps: int, packed: bool) -> list[dict[str, Any]]:
    """The training steps of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)),
            *("pretrain_sft.py", "--config", config, "--train-iters", str(steps), "--lr-warmup-iters", "1"),
            *("--eval-iters", "0", "--run-dir", folder, "--save", f"{folder}/checkpoints"),
            "--sequence-packing" if packed else "--no-sequence-packing",
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        return [record for record in records if record["kind"] == "train"][WARMUP_STEPS:]


def main() -> None:
    """Print one line per round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ratios = []
    print("| round | packed, tokens/s | padded, tokens/s | ratio | computed per real token, packed | padded |")
    print("|---|---|---|---|---|---|")
    for number in range(1, arguments.rounds + 1):
        kinds = [run(arguments.config, arguments.nproc_per_node, arguments.steps, packed) for packed in (True, False)]
        speeds = [statistics.median(step["tokens_per_second"] for step in steps) for steps in kinds]
        computed = [sum(s["padded_tokens"] for s in steps) / sum(s["tokens"] for s in steps) for steps in kinds]
        losses = [steps[-1]["loss"] for steps in kinds]
        assert abs(losses[0] - losses[1]) < 1e-3 * losses[1], f"the two did not train alike: {losses}"
        ratios.append(speeds[0] / speeds[1])
        columns = [f"{number}", *(f"{x:,.0f}" for x in speeds), *(f"{x:.2f}" for x in (ratios[-1], *computed))]
        print("| " + " | ".join(columns) + " |", flush=True)
    print(f"\nmedian ratio: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
