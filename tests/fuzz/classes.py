"""The classes of input that the product reads: sound examples, how they are mutated, and the code
that reads them.

A reader takes mutated bytes. It returns if they are sound after all, or raises what the product
raises. Whatever is trained on is read as training reads it, record by record: one that fails must
say in which file it is.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from megatron.blending.energon._encoding.decode import SampleDecoder, decode_part
from megatron.blending.energon._encoding.file_store import SystemFileStore, WebdatasetFileStore
from megatron.blending.energon._loading.load import get_train_dataset
from megatron.blending.energon._loading.loader import WorkerConfig, get_loader
from megatron.blending.energon._prepare import (
    Preparation,
    prepare_jsonl,
    prepare_webdataset,
)
from megatron.blending.energon._streams.group_batch import GroupBatchDataset
from megatron.blending.energon._streams.packing_buffer import PackingDataset
from megatron.blending.formats.record import RecordError, read_records
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.mapping import FilterDataset
from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.chats import open_chats
from megatron.sft.data.tokenizer import build_tokenizer
from tests.fuzz.mutate import mutated_bytes, mutated_value

Read = Callable[[bytes], None]
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "fine", "weight": 0.5, "train": True},
    ],
    "weight": 2.0,
}
RECORDS: list[dict[str, Any]] = [
    CHAT,
    {"instruction": "add", "input": "1 2", "output": "3", "history": [["a", "b"]]},
    {"prompt": "once", "completion": " upon"},
    {
        "prompt": CHAT["messages"][:2],
        "responses": ["yes", [CHAT["messages"][2]]],
        "weights": [1, 2],
    },
    {"messages": [CHAT["messages"][1], [CHAT["messages"][2], [CHAT["messages"][2]]]]},
    {"text": "a text"},
    {"tokens": [1, 2, 3]},
    {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        "tools": "[]",
    },
]
SPLIT = {"split_parts": {"train": ["{a,b}.tar"], "val": ["b.tar"]}, "exclude": ["a.tar/a/s1"]}
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


class Unclear(Exception):
    """An error that does not say where or what, or something worse."""


@dataclass(frozen=True)
class InputClass:
    """One kind of input."""

    name: str
    make: Callable[[Path], tuple[Sequence[bytes], Read]]
    """Writes what belongs to it below a folder, and returns sound examples and what reads them."""
    is_values: bool = False
    """Whether examples are JSON whose values are mutated, beside their bytes."""
    is_lines: bool = False
    """Whether they are lines of that."""

    def input(self, examples: Sequence[bytes], random: Random) -> bytes:
        """Return one mutated example."""
        example = random.choice(examples)
        if not self.is_values or example[:1] not in b"[{" or random.random() < 0.4:
            return mutated_bytes(example, random, list(examples))
        lines = example.splitlines() if self.is_lines else [example]
        at = random.randrange(len(lines))
        try:
            lines[at] = json.dumps(mutated_value(json.loads(lines[at]), random)).encode()
        except RecursionError:  # deep within deep
            lines[at] = b"[" * 2000
        return b"".join(line + b"\n" for line in lines)


def train_on(path: Path, split: str = "train") -> None:
    """Read eight records of each source and make samples of them, as training does; what fails must
    tell its file.
    """
    encoder = ChatEncoder(build_tokenizer("ByteLevelTokenizer"), 64, "truncate")
    faults = []
    for entry in source_entries(load_metadataset(path, split)):
        node: Any = open_chats(entry, encoder)
        for number, record in enumerate(read_records(node.source, range(min(8, len(node.source))))):
            place = node.source.describe(number)
            if str(path.parent) not in place:
                raise Unclear(f"{place} says nothing of {path.parent}")
            try:
                if isinstance(record, RecordError):
                    raise record
                node.load(record, ("", number, number))
            except SkipSample:
                continue
            except ValueError as error:
                if isinstance(error, UnicodeError):
                    raise
                faults.append(f"{place}: {error}")
    if faults:
        raise ValueError(faults[0])


def _file(name: str, *examples: bytes) -> Callable[[Path], tuple[Sequence[bytes], Read]]:
    """A file that is trained on."""

    def make(folder: Path) -> tuple[Sequence[bytes], Read]:
        def read(content: bytes) -> None:
            (folder / name).write_bytes(content)
            train_on(folder / name)

        return examples, read

    return make


def _parquet(folder: Path) -> tuple[Sequence[bytes], Read]:
    import pyarrow
    import pyarrow.parquet

    examples = []
    rows = [{"text": f"text {n} " * 5, "n": n} for n in range(12)]
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}]}
        for n in range(6)
    ]
    for table, options in (
        (pyarrow.Table.from_pylist(rows), {"row_group_size": 3, "compression": "none"}),
        (pyarrow.Table.from_pylist(rows), {"compression": "snappy", "use_dictionary": False}),
        (pyarrow.Table.from_pylist(chats), {"compression": "zstd", "data_page_version": "2.0"}),
    ):
        pyarrow.parquet.write_table(table, folder / "example.parquet", **options)
        examples.append((folder / "example.parquet").read_bytes())
    return examples, _file("fuzzed.parquet")(folder)[1]


def _indexed(folder: Path) -> tuple[Sequence[bytes], Read]:
    np.arange(30, dtype=np.uint16).tofile(folder / "fuzzed.bin")
    head = (
        b"MMIDIDX\0\0"
        + (1).to_bytes(8, "little")
        + b"\x08"
        + (3).to_bytes(8, "little")
        + (4).to_bytes(8, "little")
    )
    arrays: list[Any] = [
        np.array([10, 5, 15], np.int32),
        np.array([0, 20, 30], np.int64),
        np.arange(4, dtype=np.int64),
    ]

    def read(content: bytes) -> None:
        (folder / "fuzzed.idx").write_bytes(content)
        train_on(folder / "fuzzed.bin")

    return [head + b"".join(array.tobytes() for array in arrays)], read


def _jsonl_index(folder: Path) -> tuple[Sequence[bytes], Read]:
    (folder / "fuzzed.jsonl").write_bytes(LINES)
    prepare_jsonl(str(folder / "fuzzed.jsonl"))

    def read(content: bytes) -> None:
        (folder / "fuzzed.jsonl.idx").write_bytes(content)
        train_on(folder / "fuzzed.jsonl")

    return [(folder / "fuzzed.jsonl.idx").read_bytes()], read


def _archive(num_samples: int, kind: int = tarfile.USTAR_FORMAT, long: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for number in range(num_samples):
            for part, content in (("txt", b"a text"), ("json", json.dumps({"n": number}).encode())):
                member = tarfile.TarInfo(f"{long}s{number}.{part}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _folder(root: Path, sample_type: str = "TextSample") -> Path:
    """A prepared folder of two shards."""
    folder = root / "fuzzed"
    if not folder.exists():
        folder.mkdir()
        for name in ("a.tar", "b.tar"):
            (folder / name).write_bytes(_archive(3, long=f"{name[0]}/"))
        field_map = {} if sample_type == "CrudeWebdataset" else {"text": "txt"}
        prepare_webdataset(str(folder), Preparation(sample_type=sample_type, field_map=field_map))
    return folder


def _in_folder(
    name: str, *more: bytes, sample_type: str = "TextSample"
) -> Callable[[Path], tuple[Sequence[bytes], Read]]:
    """A file of a prepared folder."""

    def make(root: Path) -> tuple[Sequence[bytes], Read]:
        folder = _folder(root, sample_type)
        examples = more or [(folder / name).read_bytes()]

        def read(content: bytes) -> None:
            (folder / name).write_bytes(content)
            train_on(folder)

        return examples, read

    return make


def _shard(root: Path) -> tuple[Sequence[bytes], Read]:
    """An archive as it is, read through where its index does not fit it, and prepared again."""
    _, read = _in_folder("a.tar")(root)
    folder = root / "fuzzed"

    def read_and_prepare(content: bytes) -> None:
        if len(content) % 8:  # of the others, as each takes ten times as long
            return read(content)
        fault: ValueError | None = None
        try:
            read(content)
        except ValueError as error:
            fault = error
        prepare_webdataset(
            str(folder),
            Preparation(sample_type="TextSample", field_map={"text": "txt"}, force_overwrite=True),
        )
        if fault is not None:
            raise fault
        return None

    long = "folder/" * 20
    return [
        _archive(3),
        _archive(3, tarfile.PAX_FORMAT, long),
        _archive(3, tarfile.GNU_FORMAT, long),
    ], read_and_prepare


def _sqlite(root: Path) -> tuple[Sequence[bytes], Read]:
    folder = _folder(root)
    index = folder / ".nv-meta" / "index.sqlite"

    def read(content: bytes) -> None:
        index.write_bytes(content)
        store = WebdatasetFileStore(str(folder), decode_part)
        for key in ("a/s0.txt", "b/s2.json"):
            store.get(key)

    return [index.read_bytes()], read


def _store(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Names that records ask a store for."""
    plain = folder / "fuzzed"
    (plain / "in").mkdir(parents=True)
    (plain / "in" / "a.txt").write_text("inside")
    (folder / "secret.txt").write_text("outside")
    prepared = _folder(folder / "fuzzed")

    def read(content: bytes) -> None:
        name = content.decode("utf-8", "surrogateescape")
        found = []
        for store in (
            SystemFileStore(str(plain), decode_part),
            WebdatasetFileStore(str(prepared), decode_part),
        ):
            try:
                found.append(store.get(name, {}))
            except ValueError as error:
                fault = error
        if "outside" in found:
            raise Unclear(f"{name!r} leads out of the store")
        if not found:
            raise fault

    return [
        b"in/a.txt",
        b"../secret.txt",
        b"/etc/passwd",
        b"a/s0.txt",
        b"in/../../secret.txt",
    ], read


def _parts(folder: Path) -> tuple[Sequence[bytes], Read]:
    """A suffix, a newline, and the content of a part of a sample."""
    arrays = io.BytesIO()
    np.save(arrays, np.arange(6.0).reshape(2, 3))
    many = io.BytesIO()
    np.savez_compressed(many, a=np.arange(3), b=np.ones(2))
    decode = SampleDecoder()

    def read(content: bytes) -> None:
        name, _, rest = content.partition(b"\n")
        decode(name.decode("utf-8", "replace"), rest)

    examples = {
        "json": LINES.splitlines()[0],
        "json.gz": gzip.compress(LINES.splitlines()[0]),
        "txt": "é".encode(),
        "cls": b"12",
        "npy": arrays.getvalue(),
        "npz": many.getvalue(),
        "pkl": pickle.dumps([1]),
    }
    return [name.encode() + b"\n" + content for name, content in examples.items()], read


def _metadataset(folder: Path) -> tuple[Sequence[bytes], Read]:
    (folder / "a.jsonl").write_bytes(LINES)
    prepared = _folder(folder).rename(folder / "prepared")
    leaf = {
        "path": "a.jsonl",
        "weight": 2,
        "subflavors": {"sample_weight": 0.5},
        "subset": {"range": ["0%", "50%"]},
    }
    legs = [{"path": "prepared"}, {"path": "prepared", "nonmatch": "skip"}]
    joiner = {"__module__": "megatron.energon", "__class__": "TextSample"}
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    trees: list[Any] = [
        {
            **head,
            "splits": {
                "train": {
                    "blend": [leaf, {"path": str(prepared), "shuffle_over_epochs_multiplier": 2}]
                }
            },
        },
        {
            **head,
            "splits": {
                "train": {"path": "a.jsonl", "aux": {"x": "prepared", "y": {"fs_path": "."}}}
            },
        },
        {
            **head,
            "splits": {
                "train": {"blend_epochized": [{"path": "a.jsonl", "repetitions": 1.5}]},
                "val": {"path": "a.jsonl"},
            },
        },
        {**head, "splits": {"train": {"join": legs, "joiner": joiner}}},
        {
            "__class__": "Metadataset",
            "splits": {"train": {"datasets": [{"path": "a.jsonl", "weight": 1.5}]}},
        },
    ]
    return [json.dumps(tree, indent=1).encode() for tree in trees], _file("fuzzed.yaml")(folder)[1]


def _dataset_yaml(root: Path) -> tuple[Sequence[bytes], Read]:
    sample = {"__module__": "megatron.energon", "__class__": "TextSample"}
    described = [
        {
            "sample_type": sample,
            "field_map": {"text": "json[a][0],txt"},
            "subflavors": {"sample_weight": 2},
        },
        {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "part_filter": ["txt"]},
        {"sample_type": sample, "sample_loader": "loader.py:load", "part_filter": "loader.py:keep"},
    ]
    return [json.dumps(one).encode() for one in described], _in_folder(".nv-meta/dataset.yaml")(
        root
    )[1]


def _options_yaml(folder: Path) -> tuple[Sequence[bytes], Read]:
    from megatron.sft.arguments.parse import parse_config

    config = {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 64,
        "mock-data": True,
        "train-iters": 4,
        "global-batch-size": 8,
        "lr": 1e-3,
        "sequence-packing": True,
        "eval-iters": 0,
        "split": "9,1",
    }

    def read(content: bytes) -> None:
        (folder / "fuzzed.yaml").write_bytes(content)
        parse_config(["--config", str(folder / "fuzzed.yaml")], 1).to_dict()

    plain = "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items()).encode()
    return [json.dumps(config).encode(), plain], read


def _command_line(folder: Path) -> tuple[Sequence[bytes], Read]:
    from megatron.sft.arguments.parse import parse_config

    (folder / "a.jsonl").write_bytes(LINES)
    schedule = '{"kind": "linear", "points": [[0, [5, 3]], [10, [1, 1]]]}'
    shape = [
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "64",
    ]
    training = ["--train-iters", "4", "--global-batch-size", "8", "--lr", "1e-3"]
    data = ["--data-path", "5", "a.jsonl", "3", "a.jsonl", "--blend-weight-schedule", schedule]
    lines = [
        [
            *shape,
            *training,
            "--mock-data",
            "--sequence-packing",
            "--max-seqlen-per-dp-cp-rank",
            "128",
        ],
        [
            *shape,
            *training,
            *data,
            "--split",
            "8,1,1",
            "--data-columns",
            "messages=dialogue,none=x",
        ],
        [
            *shape,
            *training,
            "--mock-data",
            "--rope-scaling",
            '{"rope_type": "linear", "factor": 2}',
        ],
        [*shape, *training, "--mock-data", "--num-experts", "4", "--moe-layer-freq", "0", "1"],
    ]

    def read(content: bytes) -> None:
        try:
            arguments = json.loads(content)
        except (ValueError, RecursionError):
            arguments = content.decode("utf-8", "surrogateescape").replace("\0", "").split("\n")
        if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            arguments = [str(arguments)[:5000]]
        try:
            with redirect_stdout(io.StringIO()):
                config = parse_config([*arguments], 1)
                config.data.weight_schedule(config.training.global_batch_size)
                config.to_dict()
        except SystemExit as done:  # of --help and --version
            if done.code:
                raise Unclear(f"status {done.code}") from None

    return [json.dumps(line).encode() for line in lines] + [
        "\n".join(line).encode() for line in lines
    ], read


def _mock(folder: Path) -> tuple[Sequence[bytes], Read]:
    from megatron.sft.data.mock.dataset import MockSFTDataset

    lognormal = {
        "type": "lognormal",
        "min_seq_len": 4,
        "max_seq_len": 64,
        "mean_seq_len": 20,
        "lognormal_sigma": 0.8,
    }
    uniform = {"type": "uniform", "min_seq_len": 4, "max_seq_len": 64}
    parts = [{"weight": 1, **uniform}, {"weight": 2.5, "type": "constant", "seq_len": 7}]
    configs: list[Any] = [
        {"mode": "distribution", **lognormal},
        {"mode": "distribution", "type": "mixture", "components": parts},
        {"mode": "distribution", "type": "empirical", "quantiles": [[0, 4], [0.5, 10], [1, 60]]},
        {"mode": "distribution", "type": "empirical", "preset": "chat", "max_seq_len": 64},
        {"mode": "file", "path": "lengths.csv"},
    ]

    def read(content: bytes) -> None:
        if content.startswith(b"length"):
            (folder / "lengths.csv").write_bytes(content)
            content = b'{"mode": "file", "path": "lengths.csv"}'
        (folder / "fuzzed.json").write_bytes(content)
        samples = MockSFTDataset(str(folder / "fuzzed.json"), 64, 100, 1, num_samples=100)
        assert 1 <= int(samples.lengths(np.arange(100)).max()) <= 64
        samples[99]

    return [*(json.dumps(config).encode() for config in configs), b"length\n3\n4\n64\n"], read


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'assistant' %}{% "
    "generation %}{{ m.content ~ '<end>' }}{% endgeneration %}{% else %}{{ m['content'] | trim "
    "}}{% endif %}{% endfor %}"
)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = byte_level, decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=20, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(["how are you", "fine user assistant"], trainer)
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _tokenizer(folder: Path) -> tuple[Sequence[bytes], Read]:
    """A JSON object {name of a file: what it holds}."""
    root = folder / "fuzzed"
    _write_tokenizer(root)
    names = ("tokenizer.json", "tokenizer_config.json")
    sound = {name: (root / name).read_bytes() for name in names}

    def read(content: bytes) -> None:
        name = names[content[:40].count(b"tokenizer_class")]
        for one in names:
            (root / one).write_bytes(content if one == name else sound[one])
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = build_tokenizer("HuggingFaceTokenizer", str(root))
        _encode(tokenizer)

    return list(sound.values()), read


def _encode(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer, 64, "truncate")
    for record in (RECORDS[0], RECORDS[3]):
        encoder.encode(record)


def _template(folder: Path) -> tuple[Sequence[bytes], Read]:
    _write_tokenizer(folder / "tokenizer")
    built = build_tokenizer("HuggingFaceTokenizer", str(folder / "tokenizer"))

    def read(content: bytes) -> None:
        from megatron.packing.user_files import read_text
        from megatron.sft.data.templates.chat_template import ChatTemplate
        from megatron.sft.data.templates.named import NamedTemplates

        (folder / "fuzzed.jinja").write_bytes(content)
        template = ChatTemplate(read_text(folder / "fuzzed.jinja"), {"eos_token": "<|im_end|>"})
        _encode(replace(built, templates=NamedTemplates({"default": template})))  # type: ignore[type-var]

    return [TEMPLATE.encode(), MARKED.encode()], read


def _hf_config(folder: Path) -> tuple[Sequence[bytes], Read]:
    from megatron.sft.model.huggingface.config import options_of
    from megatron.sft.model.huggingface.config_file import read_config
    from megatron.sft.options.model import ModelConfig

    base = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
    }
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    configs = [
        {"model_type": "llama", **base, "rope_scaling": scaling},
        {"model_type": "qwen3_moe", **base, **experts, "norm_topk_prob": True},
        {
            "model_type": "mistral",
            **base,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"],
        },
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                **base,
                "query_pre_attn_scalar": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"full_attention": scaling, "sliding_attention": {}},
            },
        },
    ]

    def read(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        config = read_config(folder)
        options = options_of(config, str(folder / "config.json"))
        named = {
            name: value
            for name, value in options.items()
            if name in ModelConfig.__dataclass_fields__
        }
        ModelConfig(**named, seq_length=64)

    return [json.dumps(config).encode() for config in configs], read


def _safetensors(folder: Path) -> tuple[Sequence[bytes], Read]:
    from safetensors.numpy import save

    from megatron.sft.model.huggingface.folder import INDEX, SINGLE, open_folder

    content = save({"model.a": np.ones((2, 3), np.float32), "model.b": np.zeros(4, np.float16)})
    index = json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(("model.a", "model.b"), "part.safetensors")}
    ).encode()
    (folder / "part.safetensors").write_bytes(content)

    def read(mutated: bytes) -> None:
        is_index = mutated[:1] == b"{"
        # An index is read only where no single file is.
        (folder / SINGLE).unlink(missing_ok=True)
        (folder / (INDEX if is_index else SINGLE)).write_bytes(mutated)
        open_folder(folder)

    return [content, index], read


def _checkpoint(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Tracker, checksums and what tells of the tensors: told apart by their first byte."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    from megatron.sft.model.checkpoints.checksums import (
        CHECKSUMS,
        faults_in,
        file_names,
        read_checksums,
        sum_of,
        write_checksums,
    )
    from megatron.sft.model.checkpoints.folder import TRACKER, latest_iteration
    from megatron.sft.model.checkpoints.shards import other_sound_iteration, shard_faults
    from megatron.sft.model.checkpoints.unpickling import check_metadata

    checkpoint = folder / "iter_0000001"
    checkpoint.mkdir()
    properties = TensorProperties(torch.float32)
    stored = TensorStorageMetadata(properties, torch.Size([2]), [])
    sound = {
        checkpoint / ".metadata": pickle.dumps(Metadata({"a": stored})),
        folder / TRACKER: b"1",
    }
    for path, content in sound.items():
        path.write_bytes(content)
    write_checksums(
        checkpoint, {name: sum_of(checkpoint / name) for name in file_names(checkpoint)}
    )
    sound[checkpoint / CHECKSUMS] = (checkpoint / CHECKSUMS).read_bytes()

    def read(content: bytes) -> None:
        which = checkpoint / CHECKSUMS if content[:1] == b"{" else folder / TRACKER
        which = checkpoint / ".metadata" if content[:1] == b"\x80" else which
        for path, whole in sound.items():
            path.write_bytes(content if path == which else whole)
        check_metadata(checkpoint)
        if latest_iteration(folder) == 1 and (sums := read_checksums(checkpoint)) is not None:
            faults = faults_in(checkpoint, sorted({*sums, *file_names(checkpoint)}), sums)
            faults += shard_faults(checkpoint)
            other_sound_iteration(folder, 2)
            if faults:
                raise ValueError(faults[0])

    return [*sound.values(), b"0000001\n"], read


def _run_folder(folder: Path) -> tuple[Sequence[bytes], Read]:
    from megatron.sft.report.metrics_file import METRICS_FILE, PACKS_FILE, truncate_after
    from megatron.sft.report.metrics_writer import MetricsWriter
    from megatron.sft.report.report import report
    from tests.unit_tests.sft.runs import SOURCE, STEP

    run = folder / "fuzzed"
    writer = MetricsWriter(run, train_iters=10, log_interval=1)
    writer.event("run", iteration=0, seq_length=64, global_batch_size=8, world_size=1)
    with redirect_stdout(io.StringIO()):
        for iteration in (1, 2):
            writer.step(
                replace(
                    STEP,
                    iteration=iteration,
                    sources={"a": SOURCE, "b": SOURCE},
                    dropped={"a": {"x": 1}},
                )
            )
    writer.close()
    metrics = (run / METRICS_FILE).read_bytes()
    packs = (
        b'{"kind": "packs", "iteration": 1, "capacity": 64, "packs": [[[3, 4], [5]], [[60], '
        b"[1]]]}\n" * 2
    )

    def read(content: bytes) -> None:
        is_packs = b"capacity" in content[:60]
        (run / METRICS_FILE).write_bytes(metrics if is_packs else content)
        (run / PACKS_FILE).write_bytes(content if is_packs else packs)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _without_plot():
            report(run)
            for name in (METRICS_FILE, PACKS_FILE):
                truncate_after(run / name, 1)

    return [metrics, packs], read


def _without_plot() -> Any:
    """A picture takes a second, and may fail without harm."""
    import importlib.util
    from unittest import mock

    found = importlib.util.find_spec
    return mock.patch.object(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )


def _planner(folder: Path) -> tuple[Sequence[bytes], Read]:
    """A step that ran, the options of a run and a measured cost, told apart by a key."""
    from megatron.packing.batch.layout import Alignment
    from megatron.packing.scheduling.cost import PackCost
    from megatron.packing.scheduling.step_time import StepModel
    from megatron.planner.lengths import OPTIONS_FILE, LengthOptions, RunSource
    from megatron.planner.plan_options import LayoutOptions, ModelOptions
    from megatron.planner.plan_run import as_in_run
    from megatron.planner.step_record import StepLayout, StepRecord
    from megatron.sft.arguments.parse import parse_config
    from megatron.sft.commands.length_sources import lengths_from

    cost = PackCost(linear=1.0, quadratic=0.01, fixed=1.0)
    layout = StepLayout(
        num_ranks=2, capacity=64, alignment=Alignment(), cost=cost, model=StepModel()
    )
    record = StepRecord(
        title="t", scheduler="default", layout=layout, packs=[[[3, 4], [5]], [[60], [1]]]
    ).to_json()
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 4"
    ).split()
    run_options = parse_config(
        [*words, *"--global-batch-size 8 --lr 1e-3 --mock-data".split()], 1
    ).to_dict()
    fitted = {**asdict(cost), "model": {"num_layers": 2}, "date": "x"}

    def read(content: bytes) -> None:
        head = content[:60]
        if (b"parallel" in content[:4000] and b"optimizer" in content) or b'"data"' in content:
            (folder / OPTIONS_FILE).write_bytes(content)
            run = RunSource(folder=folder, num_ranks=1, capacity=64)
            as_in_run(run, ModelOptions(), LayoutOptions(max_seqlen_per_dp_cp_rank=64), [])
        elif b"linear" in head:
            (folder / "fuzzed.json").write_bytes(content)
            read_fitted_cost(folder / "fuzzed.json").check_model({"num_layers": 2})
        else:
            (folder / "fuzzed.json").write_bytes(content)
            found = lengths_from(
                LengthOptions(source=str(folder / "fuzzed.json"), seq_length=64), None, 10
            )
            if found.record is not None:
                _ = found.record.stats

    return [record.encode(), json.dumps(run_options).encode(), json.dumps(fitted).encode()], read


def _loader_state(folder: Path) -> tuple[Sequence[bytes], Read]:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % number for number in range(60)))

    def packs() -> Any:
        """Samples are held back in packs and groups, and some left out."""
        kept = FilterDataset(
            get_train_dataset(folder / "b.jsonl"), lambda one: one["json"]["n"] % 7
        )
        tree = PackingDataset(
            kept, 5, lambda held: [held[at : at + 2] for at in range(0, len(held) - 1, 2)], list
        )
        groups = GroupBatchDataset(tree, 2, lambda pack: (len(pack), None))
        return get_loader(groups, WorkerConfig(num_workers=0), pin_memory=False)

    def loader() -> Any:
        encoder = ChatEncoder(build_tokenizer("ByteLevelTokenizer"), 64, "truncate")
        (entry,) = source_entries(load_metadataset(folder / "a.jsonl", "train"))
        return get_loader(open_chats(entry, encoder), WorkerConfig(num_workers=0), pin_memory=False)

    def read(content: bytes) -> None:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return
        again = packs() if b'"held": {}' not in content else loader()
        again.load_state_dict(found)
        for _ in range(3):
            next(iter(again), None)
        again.state_dict()

    states = []
    for make in (loader, packs):
        one = make()
        for _ in range(5):
            next(one)
        states.append(one.state_dict())
    return [json.dumps(state).encode() for state in (*states, [states[0]])], read


CLASSES = [
    InputClass("JSONL", _file("fuzzed.jsonl", LINES)),
    InputClass(
        "chat records",
        _file("fuzzed.jsonl", *(json.dumps(one).encode() + b"\n" for one in RECORDS)),
        True,
        True,
    ),
    InputClass("JSON lists of records", _file("fuzzed.json", json.dumps(RECORDS).encode()), True),
    InputClass("Parquet", _parquet),
    InputClass("token files (.idx of a .bin)", _indexed),
    InputClass("indexes of JSONL", _jsonl_index),
    InputClass("tar shards", _shard),
    InputClass("indexes of tar shards", _in_folder("a.tar.idx")),
    InputClass(".info.json", _in_folder(".nv-meta/.info.json"), True),
    InputClass("split.yaml", _in_folder(".nv-meta/split.yaml", json.dumps(SPLIT).encode()), True),
    InputClass("dataset.yaml and field maps", _dataset_yaml, True),
    InputClass("index.sqlite", _sqlite),
    InputClass("metadatasets", _metadataset, True),
    InputClass("names in auxiliary stores", _store),
    InputClass("parts of samples (gzip, npy, ...)", _parts),
    InputClass("YAML of options", _options_yaml, True),
    InputClass("command lines", _command_line, True),
    InputClass("mock data and lengths", _mock, True),
    InputClass("tokenizer folders", _tokenizer, True),
    InputClass("chat templates", _template),
    InputClass("config.json of HuggingFace", _hf_config, True),
    InputClass("safetensors and their index", _safetensors),
    InputClass("trackers and tables of checkpoints", _checkpoint),
    InputClass("metrics.jsonl and packs.jsonl", _run_folder, True, True),
    InputClass("steps, costs and options of a run", _planner, True),
    InputClass("states of loaders", _loader_state, True),
]
