"""mcore. Fingerprints of all files that a run reads. Ranks compare them before they make groups:
machines may have different copies under the same path.

A fingerprint is a hash of size and content: all of a file up to 64 MiB, otherwise evenly spread
blocks of 4 KiB (see `count_probes`), and the header of a safetensors file. Times are left out, as
equal copies differ in them. Sources of records have fingerprints of their own. Each rank reads some
MiB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from megatron.blending.formats.record import PROBE_BYTES, count_probes, probe_starts
from megatron.sft.data.datasets import Datasets
from megatron.sft.model.checkpoints.checksums import CHECKSUMS, file_names
from megatron.sft.model.checkpoints.folder import (
    TRACKER,
    checkpoint_path,
    huggingface_source,
    latest_iteration,
)
from megatron.sft.model.huggingface.folder import INDEX
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained
from megatron.sft.model.huggingface.served_files import TOKENIZER_FILES, files_like
from megatron.sft.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from megatron.sft.options.config import SFTConfig

_SMALL = 1 << 26
"""Bytes of a file that is read whole."""
_LARGEST_HEADER = 100_000_000


def fingerprints(
    config: SFTConfig, datasets: Datasets, pretrained: Pretrained | MegatronCheckpoint | None
) -> dict[str, str]:
    """Returns the fingerprints, by name, of everything that all ranks read: sources of records,
    tokenizer, chat template, pretrained weights, the checkpoint to continue.
    """
    return {
        **_of_data(datasets),
        **{str(path): fingerprint_of(path) for path in _files(config, pretrained)},
        **_of_load(config),
    }


def _of_data(datasets: Datasets) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for samples in (datasets.train, datasets.valid, datasets.test):
        for source in samples.sources:
            found.setdefault(f"the data {source.name.strip()}", []).append(
                f"{len(source)} {source.fingerprint()}"
            )
    prints = {
        name: hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()
        for name, parts in found.items()
    }
    if datasets.prompts:
        asked = repr([prompt.ids for prompt in datasets.prompts]).encode()
        prints["--sample-prompts"] = hashlib.blake2b(asked, digest_size=6).hexdigest()
    blend = datasets.train.identity.get("blend")
    if blend is not None:
        prints["the blend"] = ", ".join(
            f"{source['weight']} of {source['name']}" for source in blend["sources"]
        )
    return prints


def _files(config: SFTConfig, pretrained: Pretrained | MegatronCheckpoint | None) -> Iterable[Path]:
    data, output = config.data, config.output
    if data.resolved_tokenizer_type == "HuggingFaceTokenizer" and data.tokenizer_model is not None:
        yield from files_like(Path(data.tokenizer_model), ("config.json", *TOKENIZER_FILES))
    if data.chat_template is not None:
        yield Path(data.chat_template)
    source = huggingface_source(output.pretrained_checkpoint)
    if source is not None:
        yield from (Path(source) / name for name in ("config.json", INDEX))
    yield from weight_files(pretrained)


def weight_files(pretrained: Pretrained | MegatronCheckpoint | None) -> Iterable[Path]:
    """Returns the files of the weights that a run begins with; none if they are random."""
    if isinstance(pretrained, MegatronCheckpoint):
        yield from _files_of_checkpoint(pretrained.path)
    elif pretrained is not None:
        yield from _files_of_weights(pretrained)


def weights_at_start(
    config: SFTConfig, pretrained: Pretrained | MegatronCheckpoint | None
) -> dict[str, str] | str:
    """Returns fingerprints, by name, of the files of the weights that a run begins with; the seed,
    if they are random.
    """
    files = {path.name: fingerprint_of(path) for path in weight_files(pretrained)}
    return files or f"random, seed {config.training.seed}"


def weights_in_words(config: SFTConfig) -> str:
    """Returns the flags of the weights that a run begins with, for messages:
    `"--pretrained-checkpoint Qwen3-8B --lora-adapter chat"`.
    """
    folder, adapter = config.output.pretrained_checkpoint, config.lora.lora_adapter
    if folder is None:
        return f"random weights of --seed {config.training.seed}"
    return f"--pretrained-checkpoint {folder}" + (f" --lora-adapter {adapter}" if adapter else "")


def _files_of_weights(pretrained: Pretrained) -> Iterable[Path]:
    stored = pretrained.folder.tensors.values()
    of_scales = {one.quantized.scales.path for one in stored if one.quantized is not None}
    yield from sorted({one.path for one in stored} | of_scales)
    if pretrained.adapter is not None:
        adapter = pretrained.adapter.folder
        yield adapter.path / ADAPTER_CONFIG
        yield from sorted({stored.path for stored in adapter.tensors.values()})


def _of_load(config: SFTConfig) -> dict[str, str]:
    folder = config.output.load
    newest = None if folder is None else latest_iteration(folder)
    if folder is None or newest is None:
        return {} if folder is None else {str(Path(folder) / TRACKER): "missing"}
    iteration = config.output.ckpt_step or newest
    files = _files_of_checkpoint(checkpoint_path(folder, iteration))
    return {
        str(Path(folder) / TRACKER): f"step {newest}",
        **{str(path): fingerprint_of(path) for path in files},
    }


def _files_of_checkpoint(path: Path) -> list[Path]:
    """Returns the file of checksums: each rank checks its copy of the files against it later. A
    checkpoint without checksums returns all of its files.
    """
    if (path / CHECKSUMS).is_file():
        return [path / CHECKSUMS]
    return [path / name for name in file_names(path)]


def fingerprint_of(path: Path) -> str:
    """Returns `"1,234 bytes (0123456789ab)"`, or "missing"."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(digest_size=6)
            for block in _sampled(file, size, path.suffix == ".safetensors"):
                digest.update(block)
    except FileNotFoundError:
        return "missing"
    return f"{size:,} bytes ({digest.hexdigest()})"


def _sampled(file: BinaryIO, size: int, has_header: bool) -> Iterable[bytes]:
    if size <= _SMALL:
        yield file.read()
        return
    if has_header:
        yield file.read(min(int.from_bytes(file.read(8), "little"), _LARGEST_HEADER))
    for start in probe_starts(size, count_probes(size)):
        file.seek(start)
        yield file.read(PROBE_BYTES)
