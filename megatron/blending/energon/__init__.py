"""pure. The public names of megatron-energon 7.4.1, at the places that its users import them from.

`from megatron.energon.X import name` becomes `from megatron.blending.energon.X import name`, for
any X. `NAMES` lists for each public name whether it is the same here, differs, or is missing;
docs/coming-from/energon.md is that table. Code in this file only forwards to the rest of
`megatron.blending`.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.blending.energon._encoding import cooking, file_store
from megatron.blending.energon._encoding.decode import keep_bytes
from megatron.blending.energon._encoding.factories import Factory
from megatron.blending.energon._encoding.task_encoder import TaskEncoder, check_encoder
from megatron.blending.energon._loading.rank_loader import Loader
from megatron.blending.energon._prepare import (
    Preparation,
    prepare_jsonl,
    prepare_webdataset,
)
from megatron.blending.formats.files import read_text
from megatron.blending.formats.yaml_reader import read_yaml
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.metadataset_file import parse_metadataset
from megatron.blending.metadatasets.tree import Join, source_entries
from megatron.blending.streams.node import SavableDataset

_STEPS = (
    "encode_sample preencode_sample postencode_sample select_samples_to_pack pack_selected_samples "
    "sample_length batch_group_criterion batch encode_batch num_tokens"
).split()


class AugmentTaskEncoder(TaskEncoder[Any, Any, Any, Any]):
    """Task encoder that does what another one does, but for the methods that are overridden."""

    def __init__(self, task_encoder: TaskEncoder[Any, Any, Any, Any]) -> None:
        check_encoder(task_encoder)
        self._task_encoder = task_encoder
        self.cookers = self.cookers or task_encoder.cookers
        for name in ("decoder", "over_long", "pack_by", "max_open_groups"):
            if getattr(type(self), name) is getattr(TaskEncoder, name):
                setattr(self, name, getattr(task_encoder, name))

    def uses(self, step: str) -> bool:
        is_own = getattr(type(self), step) is not getattr(AugmentTaskEncoder, step)
        return is_own or step in vars(self) or self._task_encoder.uses(step)


class _Forwarded:
    """A stand-in for a method of the other encoder, with that method's marks."""

    def __init__(self, step: str) -> None:
        self._step = step

    def __get__(self, instance: AugmentTaskEncoder | None, owner: type) -> Any:
        return self if instance is None else getattr(instance._task_encoder, self._step)


for _step in _STEPS:
    setattr(AugmentTaskEncoder, _step, _Forwarded(_step))


class _Wrappers(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, SavableDataset) and bool(instance.children)


class BaseWrapperDataset(metaclass=_Wrappers):
    """Tells data sets that are made of others (`isinstance`). One's own kind is a MapDataset or a
    PackingDataset with functions of one's own.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            f"{type(self).__name__} runs over an iterator, which could not be continued; use "
            "MapDataset with a generator as `map_fn`, FilterDataset or PackingDataset"
        )

    def __class_getitem__(cls, _: object) -> type:
        return cls


class BaseWebdatasetFactory(Factory):
    """Prepares folders of tar shards."""

    @classmethod
    def prepare_dataset(
        cls,
        parent_path: str | os.PathLike[str],
        paths: Sequence[str],
        *,
        split_parts_ratio: Sequence[tuple[str, float]] | None = None,
        split_parts_patterns: Sequence[tuple[str, str]] | None = None,
        split_config: str = "split.yaml",
        shuffle_seed: int | None = 42,
        workers: int = 32,
        tar_index_only: bool = False,
        **ignored: object,
    ) -> set[str]:
        """Writes `.nv-meta` and the indexes of shards, whose names may have braces; return the
        names of their parts.
        """
        for name in ignored.keys() - {"progress_fn"}:
            if ignored[name]:
                raise ValueError(f"prepare_dataset: {name} is not supported; prepare without it")
        ratios = split_parts_ratio or [("train", 1.0)]
        asked = Preparation(
            shards=tuple(paths),
            split_names=tuple(name for name, _ in ratios),
            split_ratio=tuple(share for _, share in ratios),
            split_parts=[f"{name}:{pattern}" for name, pattern in split_parts_patterns or ()],
            split_config=split_config,
            shuffle_tars=shuffle_seed is not None,
            shuffle_seed=shuffle_seed or 0,
            tar_index_only=tar_index_only,
            force_overwrite=True,
            num_workers=min(workers, os.cpu_count() or 1),
        )
        return set(prepare_webdataset(os.fspath(parent_path), asked).part_names)


class CrudeJsonlDatasetFactory(Factory):
    """Prepares JSONL files."""

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Writes the index of a file beside it; returns the number of its records."""
        return prepare_jsonl(os.fspath(path))


class TraversedDatasetReference(NamedTuple):
    """A source that a metadataset names, with what the metadatasets on the way say of it."""

    path: str
    split_part: str
    aux: Mapping[str, str]
    subflavors: Mapping[str, Any]


def traverse_metadataset(
    path: str | os.PathLike[str], *, split_part: str
) -> list[TraversedDatasetReference]:
    """Returns the sources of a split of a metadataset, and of those that it names, in order;
    nothing is opened.
    """
    found: list[TraversedDatasetReference] = []
    for one in source_entries(load_metadataset(path, split_part)):
        for entry in [leg.entry for leg in one.legs] if isinstance(one, Join) else [one]:
            found.append(
                TraversedDatasetReference(entry.path, entry.split_part, entry.aux, entry.subflavors)
            )
    return found


def prepare_metadataset(path: str | os.PathLike[str]) -> None:
    """Checks all splits of a metadataset; nothing is written, as joins find partners by the indexes
    of their folders.
    """
    name = os.fspath(path)
    for split in parse_metadataset(name, read_yaml(name, read_text(name, ""))):
        load_metadataset(name, split)


class NoCachePool(cooking.DirectCache):
    """Keeps nothing: the operating system keeps what was read."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class MockLazy(cooking.Lazy):
    """Stands for what a function of its name returns."""

    def __init__(self, fname: str, get_fn: Callable[[str], Any]) -> None:
        super().__init__(get_fn, fname)

    def get(self, sample: object = None) -> Any:
        return self.store(self.fname)


class SystemFileStore(file_store.SystemFileStore):
    """Reads files below a folder, as bytes."""

    def __init__(self, base_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(os.getcwd() if base_dir is None else os.fspath(base_dir), keep_bytes)


# The names.

__version__ = "7.4.1"
"""Release of energon whose names these are."""

FileStore, Lazy, SavableDataLoader = file_store.FileStore, cooking.Lazy, Loader
CachePool = FileStoreCachePool = NoCachePool
DirectLazy = FileCacheLazy = Lazy

_WEBDATASETS = (
    "CaptioningWebdataset CrudeWebdataset ImageClassificationWebdataset ImageWebdataset "
    "InterleavedWebdataset MultiChoiceVQAWebdataset OCRWebdataset SimilarityInterleavedWebdataset "
    "TextWebdataset VQAOCRWebdataset VQAWebdataset VidQAWebdataset DefaultDecoderWebdatasetFactory "
    "DefaultGenericWebdatasetFactory JoinedWebdatasetFactory StandardWebdatasetFactory"
).split()
BaseCoreDatasetFactory = Factory
DefaultCrudeJsonlDatasetFactory = CrudeJsonlDatasetFactory
for _name in _WEBDATASETS:
    globals()[_name] = type(_name, (BaseWebdatasetFactory,), {"__module__": __name__})

_ONLY_PREPARES = (
    "a base class with `prepare_dataset`; data is opened by its path, and by its name in "
    "dataset.yaml; of a subclass `__sample_type__` and the decoder are used"
)
_DIFFERS = {
    **dict.fromkeys(
        ["BaseCoreDatasetFactory", "BaseWebdatasetFactory", *_WEBDATASETS], _ONLY_PREPARES
    ),
    **dict.fromkeys(
        ["CrudeJsonlDatasetFactory", "DefaultCrudeJsonlDatasetFactory"], _ONLY_PREPARES
    ),
    **dict.fromkeys(
        ["CachePool", "FileStoreCachePool", "NoCachePool"],
        "keeps nothing: the operating system does",
    ),
    **dict.fromkeys(
        ["BatchDataset", "MapDataset"],
        "failures are tolerated as `@stateless(failure_tolerance=)` or the WorkerConfig says",
    ),
    **dict.fromkeys(
        ["DirectLazy", "FileCacheLazy", "Lazy"], "one class, which reads when it is asked"
    ),
    "AugmentTaskEncoder": "forwards all steps and the cookers, not three methods alone",
    "Batch": "`from_samples` stacks tensors; compared by identity; `__key__` and `__restore_key__` "
    "may be left out",
    "BlendDataset": "within one output of the weights at every moment; draws them with "
    "`mode='random'`",
    "EpochizeDataset": "of finite data, too, in which energon's dries up",
    "FileStore": "no media metadata",
    "GroupBatchDataset": "at most 256 groups are open on a rank; the oldest of more goes out short",
    "LimitDataset": "counts outputs of each rank where it is outermost, else of the whole stream",
    "MixBatchDataset": "within one of the weights at every moment; draws them with `mode='random'`",
    "PackingDataset": "a sample in no pack is offered again with its block; what fits in none is "
    "dropped, logged and counted",
    "RepeatDataset": "no `restart`",
    "Sample": "compared by identity; `__restore_key__` may be left out",
    "SampleDecoder": "called with the name and the bytes of a part; no `guess_content`; pickles "
    "need `allow_code`",
    "SavableDataLoader": "its state fits any number of ranks and workers, and is refused by name "
    "for other data",
    "SavableDataset": "has no state: a loader has",
    "ShuffleBufferDataset": "mixes within windows, and holds nothing back",
    "SourceInfo": "paths are strings",
    "SystemFileStore": "no media metadata; refuses names that lead out of the folder",
    "TaskEncoder": "`current_sample_index` in methods with `@stateless(restore_seeds=True)` alone, "
    "per source; no "
    "`cache`, no `cook_crude_sample`",
    "WorkerConfig": "frozen; `worker_debug_path`, `worker_log_level` and `restore_error_handler` "
    "have no effect",
    **dict.fromkeys(
        ["get_loader", "get_savable_loader"],
        "options of caches, checkpoints, collection and watchdogs have no effect",
    ),
    **dict.fromkeys(
        ["get_train_dataset", "get_val_dataset", "get_val_datasets"],
        "code that data name needs `allow_code=True`; `parallel_shard_iters` and `handler` have no "
        "effect",
    ),
    "load_dataset": "takes no dict: `MetadatasetV2(path, splits=...)` does",
    "log_exception": "logs to `megatron.blending`",
    "prepare_metadataset": "checks all splits; nothing needs to be written for joins",
    "stateless": "may be missing; seeds come from where a sample stands, not from how many calls "
    "there were",
    "traverse_metadataset": "paths are strings; one that is missing is an error",
}
_ABSENT = {
    "DecodeFileStore": "stores that cookers get decode already",
    "FileStoreDecoder": "a decoder is any function of name and bytes",
    "GcDataset": "workers collect as Python does; leave it out",
    "IterMapDataset": "what runs over an iterator cannot be continued; use a generator as "
    "`map_fn`, or PackingDataset",
    "LogSampleDataset": "use MapDataset with a function that logs",
    "PrimaryFileStore": "`@cooker(need_primary=True)` gives the store of the source",
}
_SAME = (
    "CaptioningSample ConcatDataset Cooker CrudeSample DatasetLoader DatasetLoaderInterface "
    "DefaultTaskEncoder FilterDataset ImageClassificationSample ImageSample InterleavedSample "
    "Metadataset MetadatasetV2 MockLazy MultiChoiceVQASample OCRSample SimilarityInterleavedSample "
    "SkipSample TextSample VQASample VidQASample __version__ basic_sample_keys batch_list "
    "batch_pad_stack batch_stack concat_pad cooker edataclass generic_batch generic_concat "
    "homogeneous_concat_mix reraise_exception"
).split()
NAMES: Mapping[str, tuple[str, str]] = dict(
    sorted(
        {
            **dict.fromkeys(_SAME, ("same", "")),
            **{name: ("differs", how) for name, how in _DIFFERS.items()},
            **{name: ("absent", why) for name, why in _ABSENT.items()},
        }.items(),
        key=lambda item: (item[0].lower(), item[0]),
    )
)
"""Public name of energon's -> (same, differs or absent; how or why)."""
_OTHERS = (
    "AVDecoder",
    "BaseWrapperDataset",
    "DatasetBlendMode",
    "EPath",
    "FatalSampleError",
    "LoadedDataset",
    "LoadedDatasetList",
)
"""Names that users take from places within energon."""

_PLACES = (
    "epathlib epathlib.epath "
    "av cache cache.base cache.file_cache_pool cache.file_store cache.no_cache edataclass errors "
    "flavors flavors.base_dataset flavors.captioning flavors.crude flavors.image "
    "flavors.image_classification flavors.interleaved flavors.jsonl "
    "flavors.jsonl.crude_jsonl_dataset flavors.multichoice_vqa flavors.ocr "
    "flavors.similarity_interleaved flavors.text flavors.vid_qa flavors.vqa flavors.vqa_and_ocr "
    "flavors.webdataset flavors.webdataset.base_webdataset "
    "flavors.webdataset.default_decoder_webdataset flavors.webdataset.default_generic_webdataset "
    "flavors.webdataset.joined_webdataset flavors.webdataset.sample_decoder "
    "flavors.webdataset.standard_webdataset loader metadataset metadataset.dataset_loader "
    "metadataset.loader metadataset.loader_interface metadataset.metadataset "
    "metadataset.metadataset_v2 savable_loader source_info task_encoder task_encoder.base "
    "task_encoder.cooking task_encoder.loader worker wrappers wrappers.base wrappers.batch_dataset "
    "wrappers.blend_dataset wrappers.concat_dataset wrappers.epochize_dataset "
    "wrappers.filter_dataset wrappers.gc_dataset wrappers.group_batch_dataset "
    "wrappers.iter_map_dataset wrappers.limit_dataset wrappers.log_sample_dataset "
    "wrappers.map_dataset wrappers.mix_batch_dataset wrappers.packing_dataset "
    "wrappers.repeat_dataset wrappers.shuffle_buffer_dataset wrappers.skip"
).split()

# Without AVDecoder, which imports torch: whoever wants it names it.
__all__ = [
    *(name for name, (state, _) in NAMES.items() if state != "absent"),
    *(name for name in _OTHERS if name != "AVDecoder"),
]


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ImportError(f"energon's {name} is not here: {_ABSENT[name]}")
    if name == "AVDecoder":
        return importlib.import_module("megatron.blending.energon._media.av").AVDecoder
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "EPath":
        return importlib.import_module("megatron.blending.formats.epath").EPath
    return getattr(sys.modules["megatron.blending"], name)


class _Place(types.ModuleType):
    """Stands for a module of energon's, and has the names of all."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[__name__], name)


for _name in _PLACES:
    # The import system asks here for `megatron.blending.energon.X` once it has imported this
    # module.
    sys.modules[f"{__name__}.{_name}"] = _Place(
        f"{__name__}.{_name}", "The names of megatron.blending.energon."
    )
    if "." not in _name and _name not in __all__:
        globals()[_name] = sys.modules[f"{__name__}.{_name}"]
