"""tensor. Triton's kernels compiled for GPUs that are not here: registers, and what is spilled.

    make kernels

Compiles each kernel of `fused_cross_entropy`, that of `fused_rotary` for queries and keys, and that
of `fused_sums` for eight experts, for compute capabilities 8.0, 9.0 and 10.0, and reads what
`cuobjdump` says of the result. Prints a table.
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

from megatron.packing.model import fused_sums
from megatron.packing.model.attention import fused_rotary
from megatron.packing.model.loss import fused_cross_entropy

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
    **dict.fromkeys(("x", "out", "cos", "sin"), "*bf16"),
    "sign": "fp32",
    **dict.fromkeys(("token_stride", "batch_stride", "head_stride"), "i32"),
    **dict.fromkeys(("cos_stride", "sin_stride"), "i32"),
    "rows": "*bf16",
    "places": "*i64",
    "width": "i32",
}
OF_LOSS = {
    "LOWEST": -3.4028234663852886e38,
    "IS_DOUBLE": False,
    "BLOCK": fused_cross_entropy._BLOCK,
    "num_warps": fused_cross_entropy._WARPS,
}


def of_heads(heads: int, width: int, *, is_interleaved: bool) -> dict[str, Any]:
    """Returns what is known of queries or keys when their kernel is compiled."""
    own = {"batch": 1, "heads": heads, "IS_INTERLEAVED": is_interleaved}
    return own | fused_rotary.sizes_of(heads, width, width // 2)


KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "statistics": (fused_cross_entropy._statistics, OF_LOSS),
    "gradients": (fused_cross_entropy._gradients, OF_LOSS),
    "rotary, 32 heads of 64": (fused_rotary._turn, of_heads(32, 64, is_interleaved=False)),
    "rotary, 8 heads of 64": (fused_rotary._turn, of_heads(8, 64, is_interleaved=False)),
    "rotary, 32 heads of 128, interleaved": (
        fused_rotary._turn,
        of_heads(32, 128, is_interleaved=True),
    ),
    "sums of 8 rows": (
        fused_sums._sum_rows,
        {"NUM_ROWS": 8, "BLOCK": fused_sums._BLOCK, "num_warps": fused_sums._WARPS},
    ),
}


def resources(
    kernel: Any, known: dict[str, Any], capability: int, *, is_aligned: bool
) -> dict[str, int]:
    """Returns what a program of the kernel takes; known: its constants, and its warps. is_aligned:
    sizes are multiples of 16.
    """
    names = list(kernel.arg_names)
    constants = {name: known[name] for name in names if name in known}
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
    compiled = triton.compile(source, target=target, options={"num_warps": known["num_warps"]})
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
    for name, (kernel, known) in KERNELS.items():
        for is_aligned in (True, False):
            for capability in CAPABILITIES:
                found = resources(kernel, known, capability, is_aligned=is_aligned)
                columns = [
                    name,
                    "multiples of 16" if is_aligned else "any",
                    f"{capability // 10}.{capability % 10}",
                    f"{found['REG']}",
                    f"{found['STACK'] + found['LOCAL']}",
                    f"{found['SHARED']}",
                ]
                print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
