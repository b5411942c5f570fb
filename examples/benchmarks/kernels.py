"""tensor. Triton's kernels compiled for GPUs that are not here: registers, and what is spilled.

    make kernels

Compiles each kernel of `fused_cross_entropy` for compute capabilities 8.0, 9.0 and 10.0, and reads
what `cuobjdump` says of the result. Prints a table.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.packing.model.loss import fused_cross_entropy as kernels

CAPABILITIES = (80, 90, 100)
NUM_THREADS = 32  # of a warp
SIGNATURE = {
    "logits": "*bf16",
    "labels": "*i64",
    "log_sum": "*fp32",
    "largest": "*fp32",
    "of_label": "*fp32",
    "of_loss": "*fp32",
    "num_words": "i32",
    "num_columns": "i32",
    "row_stride": "i32",
}
CONSTANTS = {"LOWEST": -3.4028234663852886e38, "IS_DOUBLE": False, "BLOCK": kernels._BLOCK}


def resources(kernel: Any, capability: int, *, is_aligned: bool) -> dict[str, int]:
    """Returns what a program of the kernel takes; is_aligned: sizes are multiples of 16."""
    names = list(kernel.arg_names)
    constants = {name: CONSTANTS[name] for name in names if name in CONSTANTS}
    aligned = [
        number
        for number, name in enumerate(names)
        if name in SIGNATURE and (is_aligned or SIGNATURE[name].startswith("*"))
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: SIGNATURE.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    target = GPUTarget("cuda", capability, NUM_THREADS)
    compiled = triton.compile(source, target=target, options={"num_warps": kernels._WARPS})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def main() -> None:
    """Prints a row per kernel, capability and alignment."""
    print(f"triton {triton.__version__}\n")
    print("| kernel | sizes | capability | registers | spilled, bytes | shared, bytes |")
    print("|---|---|---|---|---|---|")
    for name in ("_statistics", "_gradients"):
        for is_aligned in (True, False):
            for capability in CAPABILITIES:
                found = resources(getattr(kernels, name), capability, is_aligned=is_aligned)
                columns = [
                    name.removeprefix("_"),
                    "multiples of 16" if is_aligned else "any",
                    f"{capability // 10}.{capability % 10}",
                    f"{found['REG']}",
                    f"{found['STACK'] + found['LOCAL']}",
                    f"{found['SHARED']}",
                ]
                print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
