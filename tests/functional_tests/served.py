"""What servers and libraries read of the folders that this project writes, as a page.

    python -m tests.functional_tests.served --readers READERS.json --released-tokenizers FOLDER \
        --write FILE.md

READERS.json: name of a reader -> [its kind for `served_reader`, its Python, PYTHONPATH].
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from examples.benchmarks.provenance import commit
from megatron.sft.data.chat_encoder import Tokenizer
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.model.build import build_model, build_transformer_config
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained
from megatron.sft.model.huggingface.write import write_folder
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.model.lora.write import write_adapter
from tests.functional_tests import released_tokenizers
from tests.functional_tests.folder_losses import BATCH, loss_by_product, prepare
from tests.functional_tests.hf_models import options, write_model
from tests.functional_tests.oracle import CPU

MODELS = (
    "llama3 qwen2-yarn-tied qwen2-windows qwen3 mistral-windows mixtral qwen2-moe qwen3-moe "
    "gemma gemma2 gemma3 phi3 granite olmo2 olmo3 glm4 glm4-moe exaone4 ernie4.5 seed-oss smollm3 "
    "minimax-m2 ministral3 qwen3.5 qwen3.5-moe qwen3-next gpt-oss"
).split()
ADAPTED = ("llama3", "qwen3", "mixtral")
_LORA = "--lora --lora-rank 8"
_TOLERANCE = 2e-5
"""Relative, in float32: libraries sum in another order."""


class Case(NamedTuple):
    """A folder that was written, and what has to be read of it."""

    name: str
    folder: Path
    expected: Mapping[str, Any]


def _export(
    source: Path, target: Path, text: str = "", tokenizer: Tokenizer | None = None
) -> float:
    """Writes a folder, or an adapter, as a run does at its end, and returns the loss of its
    model.
    """
    config = options(text, source, 1)
    assert config.data.vocab_size is not None
    pretrained = open_pretrained(config, config.data.vocab_size)
    assert isinstance(pretrained, Pretrained)
    core = build_transformer_config(config, CPU, params_dtype=torch.float32)
    (chunk,) = build_model(config, core, config.data.vocab_size, CPU, pretrained)
    companions = Companions(config, tokenizer, config.data.vocab_size, "float32")
    if config.lora.lora:
        adapter = AdapterWeights(pretrained.weights, config.lora)
        beside = partial(companions.write_beside_adapter, adapter)
        with torch.no_grad():  # B is zero at first, which would hide all that is read wrongly
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.2)
        write_adapter(target, [unwrap_model(chunk)], adapter, beside)
        return loss_by_product(source, target)
    write_folder(
        target,
        [unwrap_model(chunk)],
        pretrained.weights,
        companions.write,
        source=companions.source(),
    )
    return loss_by_product(target)


def _sequences() -> dict[str, Any]:
    """Returns the sequences that losses are of."""
    rows = [
        (sample.tokens.tolist(), sample.labels.tolist(), sample.loss_mask.tolist())
        for sample in BATCH
    ]
    return {"sequences": rows, "num_trained": sum(sum(map(bool, row[2])) for row in rows)}


def write_models(place: Path, names: Sequence[str]) -> Iterator[Case]:
    """Yields a folder of each model, as transformers 5 writes its source, and adapters of some."""
    for name in names:
        source, target = place / f"{name}-source", place / name
        write_model(name, source)
        loss = _export(source, target)
        config = json.loads((target / "config.json").read_text())
        ends = config.get("eos_token_id")
        yield _case(name, target, _sequences() | {"loss": loss, "ends": ends, "dtype": "float32"})
        if name in ADAPTED:
            adapter = place / f"{name}-adapter"
            loss = _export(source, adapter, _LORA)
            more = {"adapter": str(adapter), "base": str(source), "loss": loss, "r": 8}
            yield _case(f"{name}, adapter", adapter, _sequences() | more)


def write_tokenizers(place: Path, packages: Path) -> Iterator[Case]:
    """Yields a folder with each released tokenizer and its chat template."""
    chats = [record for record in released_tokenizers.RECORDS.values() if "messages" in record]
    for name, release in released_tokenizers.RELEASES.items():
        target = place / f"tokenizer-{name.replace(' ', '-')}"
        source = target.with_name(f"{target.name}-source")
        released_tokenizers.write_model(release, packages, source)
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(source))
        text = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {source}"
        _export(source, target, text, tokenizer)
        texts = [released_tokenizers.PROBE, "1. One\n2. Two", "it's 2026-11-28T10:00Z"]
        released = json.loads((source / "tokenizer_config.json").read_text())
        ends = json.loads((target / "generation_config.json").read_text()).get("eos_token_id")
        yield _case(
            name,
            target,
            {
                "texts": texts,
                "ids": [list(map(int, tokenizer.encode(text))) for text in texts],
                "chats": chats if "chat_template" in released else [],
                "ends": ends,
            },
        )
        shutil.rmtree(source)


def _case(name: str, folder: Path, expected: dict[str, Any]) -> Case:
    (folder / "expected.json").write_text(json.dumps(expected))
    return Case(name, folder, expected)


def read(kind: str, python: str, path: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns what an environment reads of each folder."""
    reader = Path(__file__).with_name("served_reader.py")
    folders = [str(case.folder) for case in cases]
    more = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [python, str(reader), kind, *folders],
        env=os.environ | more | {"VLLM_CONFIGURE_LOGGING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def cell(expected: Mapping[str, Any], found: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Returns `=`, or what differs.

    first: what the first reader found, whose texts of chats are compared.
    """
    if "error" in found:
        return str(found["error"]).splitlines()[0][:90].replace("|", "/")
    wrong = []
    if "loss" in found and abs(found["loss"] / expected["loss"] - 1) > _TOLERANCE:
        wrong.append(f"loss {found['loss']:.4f}, not {expected['loss']:.4f}")
    for name in ("ids", "ends", "dtype", "r"):
        if name in found and name in expected and found[name] != expected[name]:
            shown = "other tokens" if name == "ids" else f"{name} {found[name]}"
            wrong.append(shown)
    if "chats" in found and found["chats"] != first.get("chats"):
        wrong.append("another template")
    return "; ".join(wrong) or "="


NOTES = "\nWhat differs, and what follows:\n"
"""Begins the part of the page that is written by hand, and kept."""


def page(
    cases: Sequence[Case], found: Mapping[str, Sequence[Mapping[str, Any]]], versions: str
) -> str:
    """Returns Markdown: a row per folder, a column per reader."""
    lines = [
        "# What a server reads of the folder we write",
        "",
        f"{date.today()}, commit {commit()}, CPU; {versions}",
        "",
        "```",
        "make served",
        "```",
        "",
        "Folders as a run writes them from a tiny model that transformers 5.24 saved. `=`: the "
        "loss of the training within 2e-5 (float32), tokens of texts, texts of chats and of calls, "
        "type of the weights, ends of generation, ranks of adapters are the same. Of vLLM its "
        "readers of config.json, generation_config.json, tokenizers and adapters alone are run; "
        "the loss beside it is that of its transformers with its config.",
        "",
        f"| folder | {' | '.join(found)} |",
        "|---" * (len(found) + 1) + "|",
    ]
    first = next(iter(found.values()))
    for number, case in enumerate(cases):
        cells = [cell(case.expected, rows[number], first[number]) for rows in found.values()]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readers", type=Path, required=True)
    parser.add_argument("--released-tokenizers", type=Path)
    parser.add_argument("--only", nargs="*", default=MODELS, help="models")
    parser.add_argument("--versions", default="", help="what the page says of the readers")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    readers = json.loads(arguments.readers.read_text())
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        write_model("llama3", place / "any")
        prepare(place / "any")
        cases = list(write_models(place, arguments.only))
        if arguments.released_tokenizers is not None:
            cases += write_tokenizers(place, arguments.released_tokenizers)
        found = {
            reader: read(kind, python, path, cases)
            for reader, (kind, python, path) in readers.items()
        }
    text = page(cases, found, arguments.versions)
    print(text)
    if arguments.write is not None:
        previous = arguments.write.read_text() if arguments.write.exists() else ""
        notes = previous[previous.find(NOTES) :] if NOTES in previous else ""
        arguments.write.write_text(text + notes)
    sys.exit(0)


if __name__ == "__main__":
    main()
