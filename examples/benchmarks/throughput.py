"""pure. Speed on one GPU, beside transformers and beside what the device's matrix products allow:

    python -m examples.benchmarks.throughput --profile --output
        examples/benchmarks/results/throughput.md
    python -m examples.benchmarks.throughput --device cpu --tiny
        (a dry run: no figure of it means anything)

Each case is a process of its own (throughput_case.py), so that one that fails or has too little
memory costs no other. The most wanted come first, and what no longer fits into --minutes is left
out and named. MFU is of real FLOPs (real tokens, causal attention as L^2 / 2), against the 989
TFLOP/s that NVIDIA gives for an H200 in bfloat16, and against 790 that its matrix products were
measured to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.benchmarks.provenance import commit
from megatron.sft.environment import let_memory_grow

ROOT = Path(__file__).parents[2]
SPECIFIED, MEASURED = 989, 790
CASE_SECONDS = 150
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 "
    "--disable-bias-linear --group-query-attention --num-query-groups 8 --mock-data"
)
LARGE_VOCABULARY = "--vocab-size 128256 --bf16"
SHAPES = {
    "1B": "--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 "
    + LARGE_VOCABULARY,
    "3B": "--num-layers 28 --hidden-size 3072 --num-attention-heads 24 --ffn-hidden-size 8192 "
    + LARGE_VOCABULARY,
    "8B, 12 of 32 layers": "--num-layers 12 --hidden-size 4096 --num-attention-heads 32 "
    "--ffn-hidden-size 14336 "
    "--untie-embeddings-and-output-weights " + LARGE_VOCABULARY,
    "30B-A3B, 8 of 48 layers": "--num-layers 8 --hidden-size 2048 --num-attention-heads 32 "
    "--kv-channels 128 --num-query-groups 4 --qk-layernorm --ffn-hidden-size 6144 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    "--untie-embeddings-and-output-weights --vocab-size 151936 --bf16",
    "8B, LoRA": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--ffn-hidden-size 14336 --lora --lora-rank 16 "
    "--untie-embeddings-and-output-weights " + LARGE_VOCABULARY,
}
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --vocab-size 512"
)
TINY_PARTS = {
    "30B-A3B, 8 of 48 layers": "--qk-layernorm --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 32 --untie-embeddings-and-output-weights",
    "8B, LoRA": "--lora --lora-rank 4 --untie-embeddings-and-output-weights",
}
"""Options of a dry run for shapes that are more than sizes."""
UNFUSED = "--no-cross-entropy-loss-fusion --no-bias-swiglu-fusion --no-gradient-accumulation-fusion"
CHATS = '{"mode":"distribution","type":"empirical","preset":"chat","max_seq_len":%d}'
TAIL = (
    '{"mode":"distribution","type":"lognormal","min_seq_len":16,"max_seq_len":%d,"mean_seq_len":%d,'
    '"lognormal_sigma":1.8}'
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and who trains it how."""

    way: str
    """packed, padded, transformers or matrix products; of answers: trees or paths, too."""
    shape: str = "1B"
    data: str = "chats"
    """chats, to 128K, or answers: prompts with eight answers each (throughput_trees.py)."""
    pack: int = 16384
    """Tokens of a pack."""
    kernel: str = ""
    """Of attention; the one that the product takes by itself if empty."""
    option: str = ""
    """One of the trainer's, beside the others."""
    num_steps: int = 6
    is_profiled: bool = False
    saves: bool = False
    """True if a checkpoint is saved and loaded behind the steps."""

    def __str__(self) -> str:
        names = (self.shape, self.way, self.option, self.kernel, self.data, f"{self.pack:,}")
        return " ".join(filter(None, names))

    def flags(self, is_tiny: bool) -> str:
        """Returns the trainer's options."""
        scale = 128 if is_tiny else 1
        is_long = self.data == "to 128K"
        pack, longest = self.pack // scale, (self.pack if is_long else 8192) // scale
        lengths = TAIL % (longest, longest // 16) if is_long else CHATS % longest
        tiny = f"{TINY} {TINY_PARTS.get(self.shape, '')}"
        flags = (
            f"{LLAMA} {tiny if is_tiny else SHAPES[self.shape]} {self.option} --seq-length "
            f"{longest} --lr 1e-5 --eval-iters 0 "
        )
        flags += f"--global-batch-size {8 if is_tiny or is_long else 4 * pack // 512} "
        flags += (
            f"--sft-mock-dataset-config-json {lengths} --over-length-policy truncate "
            "--log-interval 100 "
        )
        if is_long:
            flags += "--recompute-granularity full "
        if self.way == "padded":
            return flags + f"--micro-batch-size {pack // longest}"
        return flags + f"--sequence-packing --max-seqlen-per-dp-cp-rank {pack}"


def cases(is_profiled: bool, is_tiny: bool) -> list[Case]:
    """Returns all of them, in the order in which they are worth their time."""
    kernels = ["scaled_dot_product"] if is_tiny else []
    if (
        find_spec("flash_attn") is not None and not is_tiny
    ):  # else torch's is what the product takes by itself
        kernels = (
            ["varlen_attn", "flash-attn-4"]
            if find_spec("transformer_engine") is not None
            else ["varlen_attn"]
        )
    experts, adapters = "30B-A3B, 8 of 48 layers", "8B, LoRA"
    dense = [shape for shape in SHAPES if shape not in (experts, adapters)]
    first = [
        case
        for shape in (*dense, experts, adapters)
        for case in (
            Case(way="packed", shape=shape, is_profiled=is_profiled, saves=shape == dense[0]),
            Case(way="transformers", shape=shape),
            Case(way="matrix products", shape=shape),
        )
    ]
    return [
        *first,
        Case(way="packed", shape=experts, option="--moe-permute-fusion"),
        Case(way="packed", shape=experts, option="--no-moe-grouped-gemm", num_steps=2),
        *(
            Case(way=way, data="answers")
            for way in ("trees", "paths", "transformers", "matrix products")
        ),
        Case(way="packed", option="--keep-logits"),
        Case(way="packed", option=UNFUSED),
        Case(way="padded", num_steps=3),
        *(Case(way="packed", kernel=kernel) for kernel in kernels),
        Case(way="packed", pack=32768),
        Case(way="packed", shape="8B, 12 of 32 layers", pack=32768),
        Case(way="packed", data="to 128K", pack=131072, num_steps=3),
        *(Case(way="padded", shape=shape, num_steps=2) for shape in dense[1:]),
    ]


class Running:
    """The process of a case, which waits for `result` as soon as it has imported what it needs:
    that of the next case is started while one is measured.
    """

    def __init__(self, case: Case, device: str, is_tiny: bool) -> None:
        environment = dict(os.environ)
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.case = case
        self._folder = tempfile.TemporaryDirectory()
        asked = {"case": asdict(case), "flags": case.flags(is_tiny), "folder": self._folder.name}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.benchmarks.throughput_case", json.dumps(asked)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        """What it measured; {"failed": the last line that it said} if it did not."""
        try:
            _, errors = self._process.communicate("\n", CASE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"not over after {CASE_SECONDS} s"}
        finally:
            self.close()
        if self._process.returncode == 0:
            return self._found
        print(errors[-4000:], file=sys.stderr)
        lines = [line for line in errors.splitlines() if "Error" in line] or ["no reason given"]
        return {"failed": "out of memory" if "OutOfMemoryError" in lines[-1] else lines[-1][:120]}

    def close(self) -> None:
        """End it, also before it was asked for its result."""
        self._process.kill()
        self._process.wait()
        found = Path(self._folder.name) / "result.json"
        self._found: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
        self._folder.cleanup()


def row(case: Case, found: dict[str, Any], packed: dict[str, Any] | None) -> list[str]:
    """One of the table; FLOPs of a token are those of the same data, packed."""
    names = [
        case.shape,
        case.data,
        f"{case.pack:,}",
        f"{case.way} {case.option}".strip(),
        case.kernel or found.get("kernel", ""),
    ]
    if "failed" in found:
        return [*names, found["failed"], *[""] * 7]
    speed = found["tokens_per_second"]
    teraflops = speed * packed["flops_per_token"] / 1e12 if packed else None
    memory = [f"{found[name]:.1f}" if name in found else "" for name in ("peak_gib", "held_gib")]
    waited = f"{found['data_wait']:.1%}" if "data_wait" in found else ""
    padded = f"{found['padding']:.1%}" if "padding" in found else ""
    flops = ["", "", ""]
    if teraflops is not None:
        shares = (f"{teraflops / peak:.1%}" for peak in (SPECIFIED, MEASURED))
        flops = [f"{teraflops:,.4g}", *shares]
    return [*names, f"{speed:,.0f}", *flops, *memory, waited, padded]


COLUMNS = (
    *(
        "model",
        "lengths",
        "pack",
        "way",
        "attention",
        "tokens/s",
        "TFLOP/s",
        "MFU of 989",
        "of 790",
    ),
    *("peak GiB", "held GiB", "data wait", "padding"),
)


def main() -> None:
    """Print the table row by row, then write all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and lengths of a dry run")
    parser.add_argument(
        "--profile", action="store_true", help="the ten costliest kernels of each model, packed"
    )
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--cases", type=int, help="only so many, the first")
    parser.add_argument(
        "--only", default="", help="those in whose words this is: 30B, LoRA, trees, '1B packed'"
    )
    parser.add_argument("--output", type=Path, help="a Markdown file")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu is a dry run; pass --tiny, too")
    let_memory_grow()
    start = time.monotonic()
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    print("\n".join(lines), flush=True)
    profiles, left_out, machine = [], [], ""
    packed: dict[tuple[str, str], dict[str, Any]] = {}
    wanted = [
        each for each in cases(arguments.profile, arguments.tiny) if arguments.only in f"{each}"
    ]
    wanted = wanted[: arguments.cases]
    if not wanted:
        parser.error(f"--only {arguments.only} is in no case's words")
    ahead = Running(wanted[0], arguments.device, arguments.tiny)
    for case, following in zip(wanted, [*wanted[1:], None]):
        running = ahead
        if following is not None:
            ahead = Running(following, arguments.device, arguments.tiny)
        if time.monotonic() - start > 60 * arguments.minutes - CASE_SECONDS / 3:
            running.close()
            left_out.append(str(case))
            continue
        found = running.result()
        if "flops_per_token" in found:
            packed.setdefault((case.shape, case.data), found)
        machine = found.get("machine", machine)
        lines.append(f"| {' | '.join(row(case, found, packed.get((case.shape, case.data))))} |")
        print(lines[-1], flush=True)
        if "profile" in found:
            name = f"{case.shape} {case.option}".strip()
            summary = f"{found['busy']:.0%} of a step, {found['launches']:,.0f} launches"
            if "checkpoint" in found:
                summary += "; {GB:.1f} GB saved in {save:.1f} s, loaded in {load:.1f} s".format(
                    **found["checkpoint"]
                )
            profiles.append((f"{name}, packed ({summary})", found["profile"]))
    text = document(arguments, machine, lines, left_out, profiles, time.monotonic() - start)
    if arguments.output is not None:
        arguments.output.write_text(text)
    else:
        print(text.partition(lines[-1])[2])  # what was not printed yet


def document(
    arguments: argparse.Namespace,
    machine: str,
    lines: list[str],
    left_out: list[str],
    profiles: list[tuple[str, list[Any]]],
    seconds: float,
) -> str:
    """The results file."""
    text = "# Speed on one GPU\n\n"
    if arguments.device == "cpu":
        text += (
            "**This is a dry run on CPU with tiny models and lengths. It shows that every case "
            "runs; its figures mean\nnothing.**\n\n"
        )
    flags = (
        f"--device {arguments.device}{' --tiny' * arguments.tiny}{' --profile' * arguments.profile}"
        f"{f' --only {arguments.only!r}' if arguments.only else ''}"
    )
    text += f"{date.today()}, commit {commit()}, {machine}, {seconds / 60:.1f} minutes.\n\n"
    text += f"```\npython -m examples.benchmarks.throughput {flags}\n```\n\n"
    text += __doc__[__doc__.index("Each case is") :] + "\n"
    text += (
        "`transformers` is its model of the same shape (with peft's adapters for LoRA) without "
        "padding, on the same packs and by the same\n"
        "attention kernel, with weights, gradients and the state of a fused AdamW all in bfloat16: "
        "less work than the float32 ones of the\n"
        "other rows. `matrix products` is the time of a pack's matrix products alone, of layers "
        "and output layer,\n"
        "forward and backward: a limit. Padded rows are two at a time, padded to the longer of "
        "them.\n"
        "Held is what torch's allocator kept of the device at most, peak what tensors took of it.\n"
        "`answers` are prompts of 2,048 tokens with eight answers of 256 each, which count: as "
        "trees, or as a sequence per\n"
        "answer (paths). Tokens are those of paths; the limit is that of trees. Data are ready.\n\n"
    )
    text += "\n".join(lines) + "\n"
    if left_out:
        text += f"\nLeft out for want of time: {'; '.join(left_out)}.\n"
    if profiles:
        text += "\nOf a step: the time of all kernels over that of a step without a profiler.\n"
    for shape, kernels in profiles:
        text += f"\n## The ten costliest kernels: {shape}\n\n"
        text += "| kernel | share | ms per step | calls |\n|---|---|---|---|\n"
        for name, share, milliseconds, calls in kernels[:10]:
            text += (
                f"| `{name[:90].replace('|', ' ')}` | {share:.1%} | {milliseconds:.2f} | "
                f"{calls:,.0f} |\n"
            )
    return text


if __name__ == "__main__":
    main()
