"""tensor. CPU time of reading weights in fp8, by blocks of 128 x 128, beside the same weights in
bfloat16.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.quantized_read --write FILE.md

Both are read into parameters of bfloat16 by what a rank reads with, after one another, several
times. Their files are in memory: what a disk costs is not in here, and fp8 needs half of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.benchmarks.provenance import commit, processor
from megatron.sft.model.huggingface.folder import Folder, open_folder
from megatron.sft.model.huggingface.quantized.slices import DequantizedSlice, OpenFiles

SIZE, BLOCK = 4096, 128
"""Rows and columns of a weight."""


def folders(parent: Path, num_weights: int) -> dict[str, Folder]:
    """Writes the same weights in both types."""
    quantized: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for number in range(num_weights):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        codes = torch.randn(SIZE, SIZE).mul_(50).to(torch.float8_e4m3fn)
        scales = torch.rand(SIZE // BLOCK, SIZE // BLOCK).mul_(1e-3)
        quantized |= {name: codes, f"{name}_scale_inv": scales}
        values = codes.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        plain[name] = (values * scales[:, None, :, None]).reshape(SIZE, SIZE).bfloat16()
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    written = {}
    for kind, tensors, more in (
        ("fp8", quantized, {"quantization_config": method}),
        ("bfloat16", plain, {}),
    ):
        folder = parent / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **more}))
        save_file(tensors, folder / "model.safetensors")
        written[kind] = open_folder(folder)
    return written


def read(folder: Folder, parameters: dict[str, Tensor]) -> float:
    """Reads all weights into parameters; returns seconds of CPU time."""
    begin = time.process_time()
    files = OpenFiles()
    everything = slice(None), slice(None)
    for name, parameter in parameters.items():
        held = files.slice_of(folder.tensors[name], parameter.dtype)
        if isinstance(held, DequantizedSlice):
            held.fill(parameter, *everything)
        else:
            parameter.copy_(held[everything])
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024, help="of codes in fp8")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args()
    torch.manual_seed(1)
    num_weights = max(1, options.megabytes * 2**20 // SIZE**2)
    with tempfile.TemporaryDirectory() as name:
        written = folders(Path(name), num_weights)
        parameters = {
            tensor: torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)
            for tensor in written["bfloat16"].tensors
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in written}
        for number in range(options.times + 1):
            results = []
            for kind, folder in written.items():
                took = read(folder, parameters)
                results.append(next(iter(parameters.values())).clone())
                if number:  # the first reads the files into memory
                    seconds[kind].append(took)
            assert torch.equal(*results)
    ratios = [one / other for one, other in zip(seconds["fp8"], seconds["bfloat16"])]
    lines = [
        "# Reading fp8",
        "",
        f"{date.today()}, commit {commit()}, {processor()}, torch {torch.__version__}",
        "",
        "```",
        "OMP_NUM_THREADS=1 python -m examples.benchmarks.quantized_read "
        f"--megabytes {options.megabytes}",
        "```",
        "",
        f"CPU seconds of reading {num_weights * SIZE**2 / 2**20:.0f} million weights (2^20) into "
        f"bfloat16, least and most of {options.times} times, one after the other.",
        "",
        "| in the file | CPU seconds | beside bfloat16 |",
        "|---|---|---|",
        f"| bfloat16 | {min(seconds['bfloat16']):.2f} to {max(seconds['bfloat16']):.2f} | |",
        f"| fp8 by 128 x 128 | {min(seconds['fp8']):.2f} to {max(seconds['fp8']):.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} |",
    ]
    page = "\n".join(lines) + "\n"
    print(page)
    if options.write is not None:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
