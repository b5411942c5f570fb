"""mcore. Sizes that no test has: a Parquet file of 20 GB, prepared tars of a million samples,
10,000 steps with 100 restarts, a folder of 2 GB on two ranks, a vocabulary of 262,144.

    python -m examples.benchmarks.scale [CASE ...]

Each case runs in a process of its own and prints lines for the page. A case with two sizes shows
what grows. SCALE_FILES keeps the Parquet files; SCALE_STEPS and SCALE_RESTARTS make their case
smaller. Time is CPU where nothing else is said. Linux only.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from examples.benchmarks.edges import cpu, cpu_of, reset_peak, resident
from examples.benchmarks.scale_files import write_chats, write_tars

_TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 "
    "--tokenizer-type NullTokenizer --mock-data --seq-length 32 --global-batch-size 2 "
    "--lr 1e-3 --eval-iters 0 --lr-decay-style constant"
)
_GB = 1e9


def _loader(source: Any, num_given: int = 0) -> Any:
    """Returns chunks of 32 records in random order, as a rank without workers reads them."""
    from megatron.blending import RepeatDataset, SourceDataset
    from megatron.blending.loading.chunk_loader import ChunkLoader
    from megatron.blending.streams.chunk import ChunkDataset
    from megatron.blending.streams.worker_config import WorkerConfig

    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, seed=1)
    chunks = ChunkDataset(RepeatDataset(SourceDataset(source)), 32)
    return ChunkLoader(chunks, workers, num_given=num_given)


def _read_records(open_records: Callable[[], Any], what: str, num_chunks: int) -> None:
    """Prints what it costs to open records, to read them in random order, and to restore after
    these chunks and in the middle of the epoch: the same records must come again.

    It runs in a process of its own, as what an earlier size has left would not be counted.
    """
    child = os.fork()
    if child:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError(what)
        return
    code = 1
    try:
        _print_row(open_records, what, num_chunks)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _print_row(open_records: Callable[[], Any], what: str, num_chunks: int) -> None:
    reset_peak()
    resident_before = resident("VmRSS")
    start = cpu()
    source = open_records()
    num_records = len(source)
    opened = cpu() - start
    loader = _loader(source)
    first = cpu_of(next, loader)
    cost = cpu_of(lambda: [next(loader) for _ in range(num_chunks - 1)]) / (32 * (num_chunks - 1))
    expected = [str(next(loader)) for _ in range(2)]
    restored = _loader(source, num_given=num_chunks)
    start = cpu()
    again = [str(next(restored)) for _ in range(2)]
    restore = cpu() - start
    if again != expected:
        raise AssertionError("other records after a restore")
    middle = cpu_of(next, _loader(source, num_given=num_records // 64))
    grown = resident("VmHWM") - resident_before
    print(
        f"| {what} | {num_records:,} | {opened:.2f} s | {first:.2f} s | {cost * 1e6:,.0f} us | "
        f"{restore:.2f} s | {middle:.2f} s | {grown / 1e6:,.0f} MB | "
        f"{resident('RssFile') / 1e6:,.0f} MB |",
        flush=True,
    )


def parquet(folder: Path) -> None:
    """Chats in row groups of 2,000 (15 MB), 2 GB and 20 GB."""
    from megatron.blending import open_source

    for gigabytes in (2, 20):
        path = Path(os.environ.get("SCALE_FILES", folder)) / f"chats-{gigabytes}.parquet"
        if not path.exists():
            write_chats(path, int(gigabytes * _GB))
        _read_records(partial(open_source, path), f"Parquet, {gigabytes} GB", 32)


def tars(folder: Path) -> None:
    """Prepared tars of 100,000 and of a million texts."""
    from megatron.blending import open_webdataset

    for count in (100_000, 1_000_000):
        place = folder / str(count)
        place.mkdir()
        start = time.monotonic()
        write_tars(place, count)
        made = time.monotonic() - start
        index = sum(
            path.stat().st_size
            for path in place.rglob("*")
            if path.is_file() and path.suffix != ".tar"
        )
        what = f"tars, {count:,} (index {index / 1e6:,.1f} MB, made and prepared in {made:,.0f} s)"
        _read_records(partial(open_webdataset, str(place), split_part="train"), what, 256)


def _train(text: str) -> float:
    """Runs a training in a process forked from this one, which has imported everything, and returns
    its seconds of CPU.
    """
    from megatron.sft.__main__ import main as train

    before = os.times()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.argv = ["train", *text.split()]
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 1)
                train()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(text)
    after = os.times()
    return after.children_user + after.children_system - before[2] - before[3]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def restarts(folder: Path) -> None:
    """A tiny model: as many steps with restarts as without end in the same state."""
    steps = int(os.environ.get("SCALE_STEPS", "10000"))
    times = int(os.environ.get("SCALE_RESTARTS", "100"))
    import torch  # noqa: F401, so that it is imported before processes are forked

    from megatron.sft.training import train  # noqa: F401

    every = steps // times
    place, whole = folder / "restarted", folder / "whole"
    run = f"{_TINY} --train-iters {steps} --save-interval {every} --keep-checkpoints 2 --save"
    seconds, sizes = [], []
    for number in range(times):
        load = f" --load {place}" if number else ""
        seconds.append(_train(f"{run} {place}{load} --exit-interval {every}"))
        files = [path for path in sorted(place.iterdir()) if path.is_file()]
        sizes.append({path.name: path.stat().st_size for path in files} | {"all": _size(place)})
        if number % 10 == 9:
            print(
                f"  {number + 1} runs: {seconds[-1]:.1f} s, {sizes[-1]}",
                file=sys.stderr,
                flush=True,
            )
    alone = _train(f"{run} {whole}")
    print(f"- CPU of {every} steps with their start, {times} restarts: ", end="")
    for name, at in (("first", 1), ("middle", times // 2), ("last", times - 3)):
        print(f"{sum(seconds[at : at + 3]) / 3:.1f} s ({name} three), ", end="")
    print(f"{alone:.0f} s for {steps:,} steps without restarts")
    for name in sorted(sizes[-1]):
        shown = ", ".join(f"{sizes[at].get(name, 0):,}" for at in (1, times // 10, -1))
        print(f"- {name}: {shown} bytes after runs 2, {times // 10 + 1}, {times}")
    same = _weights(place, steps) == _weights(whole, steps)
    print(f"- weights and moments of the end are {'the same' if same else 'OTHERS'}")


def _weights(folder: Path, step: int) -> dict[str, str]:
    """Returns a digest of each tensor of a checkpoint."""
    import hashlib

    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    (place,) = folder.glob(f"iter_{step:07d}")
    reader = FileSystemReader(place)
    state = {
        name: torch.zeros(held.size, dtype=held.properties.dtype)
        for name, held in reader.read_metadata().state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    }
    load(state, storage_reader=reader)
    return {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in state.items()
        if value.numel()
    }


def _command(*words: str) -> tuple[float, str]:
    """Runs a command of this project, and returns its seconds and what it printed."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    return time.monotonic() - start, done.stdout


def vocabulary(folder: Path) -> None:
    """`fit` of a vocabulary of 262,144 with 1,048,576 tokens, beside one of 32,000 with 8,192."""
    for words, tokens in ((32_000, 8192), (262_144, 1 << 20)):
        model = (
            "--num-layers 2 --hidden-size 1152 --num-attention-heads 4 --mock-data --lr 1e-5 "
            f"--tokenizer-type NullTokenizer --vocab-size {words} --seq-length {tokens} --bf16 "
            "--sequence-packing --global-batch-size 1 --train-iters 1"
        )
        before = os.times()
        _, said = _command("-m", "megatron.sft", "fit", *model.split())
        after = os.times()
        used = after.children_user + after.children_system - before[2] - before[3]
        line = next(line for line in said.splitlines() if line.startswith("together")).split()[-1]
        print(f"- fit, vocabulary {words:,}, {tokens:,} tokens: {used:.1f} s CPU; {line} GiB")


def model_folder(folder: Path) -> None:
    """A Llama of 2 GB on two ranks (tensor parallel): load, a step, save, --save-hf, load again."""
    import transformers

    source, target, saved = folder / "source", folder / "target", folder / "saved"
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=15,
        num_attention_heads=12, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(source, max_shard_size="500MB")
    run = (
        "-m torch.distributed.run --nproc-per-node 2 -m megatron.sft train --mock-data "
        f"--pretrained-checkpoint {source} --tokenizer-type NullTokenizer --vocab-size 32000 "
        "--seq-length 64 --global-batch-size 1 --lr 0 --eval-iters 0 --tensor-model-parallel-size 2"
    )
    for name, more in (
        ("load, one step, --save, --save-hf", f"--train-iters 1 --save {saved} --save-hf {target}"),
        ("load of the checkpoint, one step", f"--train-iters 2 --load {saved}"),
    ):
        before = os.times()
        seconds, _ = _command(*run.split(), *more.split())
        after = os.times()
        used = after.children_user + after.children_system - before[2] - before[3]
        print(f"- {name}: {used:.0f} s CPU of both ranks, {seconds:.0f} s", flush=True)
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"- {_size(source) / 1e9:.2f} GB of weights, {_size(saved) / 1e9:.2f} GB of checkpoint; "
          f"a rank held at most {most / 1e6:.1f} GB")  # fmt: skip
    print(f"- tensors of --save-hf after a step with --lr 0: {_compare(source, target)}")


def _compare(source: Path, target: Path) -> str:
    from safetensors.torch import load_file

    def digests(folder: Path) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in folder.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                found[name] = hash(tensor.numpy().tobytes())
        return found

    return "the same bits" if digests(source) == digests(target) else "OTHERS"


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case for case in (parquet, tars, restarts, vocabulary, model_folder)
}


def main() -> None:
    """Runs cases, each in a process and a folder of its own."""
    if sys.argv[1:2] == ["--case"]:
        with tempfile.TemporaryDirectory() as made:
            CASES[sys.argv[2]](Path(made))
        return
    for name in sys.argv[1:] or list(CASES):
        command = [sys.executable, "-W", "ignore", "-m", "examples.benchmarks.scale"]
        subprocess.run([*command, "--case", name], check=True)


if __name__ == "__main__":
    main()
