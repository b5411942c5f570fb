"""pure. The options of `calibrate`, and which packs it measures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

_SEQUENCES_PER_PACK = (1, 4, 16)
_HALVINGS = 6
_SHORTEST = 8
_NUMBERS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("num_experts", "moe_ffn_hidden_size", "mtp_num_layers", "vocab_size", "seq_length", "max_seqlen_per_dp_cp_rank"),
)
_SWITCHES = (
    "group_query_attention",
    "swiglu",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "moe_router_pre_softmax",
)
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
_AT_LEAST_ONE = (*_NUMBERS, "moe_router_topk", "make_vocab_size_divisible_by", "repeats")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Options with Megatron's names; those of the model may also stand in the YAML of a training run, whose other
    options are passed over.
    """
    parser = _build_parser()
    config_file = parser.parse_known_args(arguments)[0].config
    if config_file is not None:
        _take_defaults(parser, config_file)
    options = parser.parse_args(arguments)
    for name in _REQUIRED:
        if getattr(options, name) is None:
            parser.error(f"{_flag(name)} is missing; pass it, or --config FILE with it")
    for name in _AT_LEAST_ONE:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"{_flag(name)} must be at least 1, but is {getattr(options, name)}")
    if not _is_writable(options.output):
        parser.error(f"--output {options.output} must be a file that can be written to; give another place")
    return options


def _is_writable(path: Path) -> bool:
    return not path.is_dir() and os.access(path if path.exists() else path.resolve().parent, os.W_OK)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.packing.calibrate",
        description="Measure the model on this device and write what a pack costs, for --pack-cost.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the training run; flags win")
    parser.add_argument("--output", type=Path, default=Path("pack_cost.json"), metavar="FILE", help="what to write")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="times that each pack is measured")
    for name in _NUMBERS:
        parser.add_argument(_flag(name), type=int, metavar="N")
    parser.add_argument("--moe-router-topk", type=int, default=2, metavar="N")
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N")
    parser.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    kinds = ("learned_absolute", "rope", "none")
    parser.add_argument("--position-embedding-type", choices=kinds, default="learned_absolute")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    for name in _SWITCHES:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="compute in bfloat16 (default: as --config, else on GPUs)"
    )
    return parser


def _take_defaults(parser: argparse.ArgumentParser, path: Path) -> None:
    """What the YAML file says of the parser's options, checked as on the command line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as failure:
        parser.error(f"--config {path}: {' '.join(str(failure).split())}")
    if not isinstance(content, dict):
        parser.error(f"--config {path} must map options to values, but holds {type(content).__name__}")
    flags: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in parser._option_string_actions or value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value)]
    parser.set_defaults(**vars(parser.parse_args(flags)))


def packs_to_measure(largest: int) -> list[tuple[int, ...]]:
    """Lengths of each pack: of up to `largest` tokens and down by halves, of one sequence and of several."""
    packs = dict.fromkeys(
        (total // num_sequences,) * num_sequences
        for total in (largest >> halving for halving in range(_HALVINGS))
        for num_sequences in _SEQUENCES_PER_PACK
        if total // num_sequences >= _SHORTEST
    )
    if len(packs) < 2 * len(_SEQUENCES_PER_PACK):
        raise ValueError(f"packs must hold at least 256 tokens to be measured, but hold {largest}; raise --seq-length")
    return list(packs)


def padded_vocab_size(options: argparse.Namespace) -> int:
    """Rows of the embedding, as training pads them."""
    unit = options.make_vocab_size_divisible_by
    return -(-options.vocab_size // unit) * unit


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
