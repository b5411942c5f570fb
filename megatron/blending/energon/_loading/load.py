"""pure. The functions that users begin with make a stream of a path and a task encoder.

A path is data (a prepared folder, .jsonl, .json, .parquet, .bin) or a metadataset (.yaml). For
training, sources are repeated for ever and blended by their weights, or read through a given number
of times per epoch (blend_epochized); for validation they are read one after the other, once.
Options have the names and meanings that energon gives them, but:

shuffle_buffer_size, max_samples_per_sequence   keep reads local, within an order that is fixed by
seed and epoch; None
                                                for both is the best shuffling
parallel_shard_iters                            accepted, of no effect: nothing is read ahead of
what is asked for worker_config                                   may be left out; the loader then
uses its own
"""

import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from megatron.blending.arguments import check_flag, check_one_of, check_whole, shown
from megatron.blending.energon._encoding.cooking import DECODE
from megatron.blending.energon._encoding.decode import SampleDecoder
from megatron.blending.energon._encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.energon._encoding.source_entries import UNSET, ReadSettings
from megatron.blending.energon._encoding.task_encoder import TaskEncoder, check_encoder
from megatron.blending.energon._loading.dataset_loader import (
    DatasetLoaderInterface,
    check_options,
    load_dataset,
)
from megatron.blending.formats.indexed import IndexedSource
from megatron.blending.formats.record import Record
from megatron.blending.loading.sources import (
    DatasetBlendMode,
    LoadedDataset,
    LoadedDatasetList,
    source_of,
)
from megatron.blending.loading.token_weights import by_tokens, mean_tokens
from megatron.blending.order.proportions import BlendMode
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.choice import BLEND_MODES
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.source import SourceDataset
from megatron.blending.streams.worker_config import WorkerConfig, check_worker_config

Path = str | os.PathLike[str]
Encoder = TaskEncoder[Any, Any, Any, Any]

_DECODER_OPTIONS = ("image_decode", "av_decode", "video_decode_audio")
_UNREAD = {
    "handler": "pass WorkerConfig(global_error_handler=...)",
    "sample_type": "dataset.yaml says what samples are",
}
_WITHOUT_EFFECT = ("packing_buffer_size", "weight_schedule")
"""Options that would be ignored in silence if an overridden method did not take them."""


def get_train_dataset(
    path: Path | DatasetLoaderInterface,
    *,
    split_part: str = "train",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None = None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    task_encoder: Encoder | None = None,
    repeat: bool = True,
    parallel_shard_iters: int | None = None,
    proportions: BlendMode = "exact",
    weights_by: str = "samples",
    weight_schedule: WeightSchedule | None = None,
    allow_code: bool = False,
    **options: object,
) -> SavableDataset[Any]:
    """Returns the training stream of a path, as a data set to iterate over, to give to a loader, or
    to blend.

    `proportions`: "exact", each source at every moment within a sample of its share, or "random".
    `weights_by`: what weights are shares of, "samples" or "tokens" (found by encoding a few samples
    of each source). `weight_schedule`: weights of all sources, in the order of the metadataset, as
    they change over steps. `repeat=False`: one epoch; of a blend, until all sources are read.
    `allow_code`: whether Python code that a data set names may run. `options`: of DatasetLoader
    (subflavors, dataset_config, split_config) and SampleDecoder (image_decode ...). ValueError for
    anything that cannot work, before the first sample is read.
    """
    encoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    _check(encoder, locals())
    check_flag("repeat", repeat)
    check_whole("virtual_epoch_length", virtual_epoch_length, 0)
    check_whole("max_samples_per_sequence", max_samples_per_sequence, may_be_none=True)
    check_whole("shuffle_buffer_size", shuffle_buffer_size or None, may_be_none=True)
    check_one_of("proportions", proportions, BLEND_MODES)
    check_one_of("weights_by", weights_by, ("samples", "tokens"))
    reading = ReadSettings(
        encoder=encoder,
        decoder=_decoder(encoder, options, allow_code),
        slice_length=max_samples_per_sequence,
        shuffle_window=shuffle_buffer_size or 0,
        allow_code=allow_code,
    )
    loaded = _loader(path, options, get_train_dataset).get_datasets(
        training=True,
        split_part=split_part,
        worker_config=worker_config,
        shuffle_over_epochs_multiplier=shuffle_over_epochs_multiplier,
        reading=reading,
        repeat=repeat,
    )
    datasets, weight_schedule = _weighted(f"{path}", loaded, weights_by, weight_schedule, encoder)
    return call_hook(
        encoder.build_train_datasets,
        datasets=datasets,
        worker_config=worker_config,
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        virtual_epoch_length=virtual_epoch_length,
        shuffle_buffer_size=shuffle_buffer_size,
        blend_mode=loaded.blend_mode,
        proportions=proportions,
        weight_schedule=weight_schedule,
        repeat=repeat,
    )


def get_val_dataset(
    path: Path | DatasetLoaderInterface,
    *,
    split_part: str = "val",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None = None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: Encoder | None = None,
    allow_code: bool = False,
    **options: object,
) -> SavableDataset[Any]:
    """Returns the sources of a path one after the other, each in its own order, once; at most
    `limit` batches.
    """
    build, sources = _validation(**locals())
    return build(datasets=sources)


def get_val_datasets(
    path: Path | DatasetLoaderInterface, **options: object
) -> list[tuple[Any, Any]]:
    """Returns a validation stream for each source of a path, with the source itself: to tell their
    losses apart.

    `options`: those of `get_val_dataset`.
    """
    asked = inspect.signature(get_val_dataset).bind(path, **options)
    asked.apply_defaults()
    build, sources = _validation(**asked.arguments)
    return [(build(datasets=[one]), one.dataset) for one in sources]


def _validation(
    *,
    path: Path | DatasetLoaderInterface,
    split_part: str,
    worker_config: WorkerConfig | None,
    task_encoder: Encoder | None,
    allow_code: bool,
    options: Mapping[str, Any],
    **asked: object,
) -> tuple[Callable[..., Any], list[LoadedDataset]]:
    """Returns what makes a validation stream of sources, and the sources. Takes all that the
    functions above do.

    `asked`: what only the encoder's hook uses.
    """
    encoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    _check(encoder, {**asked, **locals()})
    check_whole("limit", asked["limit"], -math.inf, may_be_none=True)
    options = dict(options)
    decoder = _decoder(encoder, options, allow_code)
    loaded = _loader(path, options, get_val_dataset).get_datasets(
        training=False,
        split_part=split_part,
        worker_config=worker_config,
        reading=ReadSettings(
            encoder=encoder, decoder=decoder, is_shuffled=False, allow_code=allow_code
        ),
    )
    build = functools.partial(
        call_hook, encoder.build_val_datasets, worker_config=worker_config, **asked
    )
    return build, loaded.datasets


def _weighted(
    path: str,
    loaded: LoadedDatasetList,
    weights_by: str,
    schedule: WeightSchedule | None,
    encoder: Encoder,
) -> tuple[list[LoadedDataset], WeightSchedule | None]:
    """Returns the sources and the schedule, with weights in samples."""
    if schedule is not None and not isinstance(schedule, WeightSchedule):
        raise ValueError(f"weight_schedule must be a WeightSchedule, but is {schedule!r}")
    if schedule is not None and loaded.blend_mode is not DatasetBlendMode.DATASET_WEIGHT:
        raise ValueError(f"{path}: weight_schedule is for a 'blend' of several sources; remove it")
    if weights_by == "samples":
        return loaded.datasets, schedule
    if loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
        raise ValueError(
            f"{path}: weights_by='tokens' is for 'blend'; 'blend_epochized' says how often to read"
        )
    return by_tokens(loaded.datasets, schedule, functools.partial(_mean_tokens, encoder))


def _mean_tokens(encoder: Encoder, loaded: LoadedDataset) -> float:
    source = source_of(loaded.dataset).source
    steps = [step for step in ("encode_sample", "preencode_sample") if encoder.uses(step)]
    if isinstance(source, IndexedSource) and not steps and not encoder.uses("num_tokens"):
        return float(np.mean(source.lengths))  # all of them stand in the index

    def count(entry: SourceDataset, record: Record, number: int) -> int:
        assert entry.load is not None
        sample: Any = entry.load(record, ("probe", number, number))
        made = getattr(encoder, steps[0])(sample) if steps else sample
        return sum(map(encoder.num_tokens, made if hasattr(made, "__next__") else [made]))

    return mean_tokens(loaded, count)


def _loader(
    path: Path | DatasetLoaderInterface, options: Mapping[str, Any], function: Callable[..., Any]
) -> DatasetLoaderInterface:
    """Returns what gives the sources; `options`: what `function` was given besides its own
    arguments.
    """
    own = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    check_options(options, [*own, *_DECODER_OPTIONS])
    if isinstance(path, DatasetLoaderInterface):
        if options:
            raise ValueError(
                f"option {shown(next(iter(options)))} is for a path; give it to load_dataset"
            )
        return path
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path must be a path or what load_dataset returns, but is {shown(path)}")
    return load_dataset(path, **options)


def _decoder(encoder: Encoder, options: dict[str, Any], allow_code: bool) -> Any:
    """Takes out of `options` what energon's older users say of decoding there, and returns the
    decoder that it means.
    """
    for name, way in _UNREAD.items():
        if options.pop(name, None) is not None:
            warnings.warn(f"{name} has no effect; {way}", stacklevel=3)
    asked = {name: options.pop(name) for name in _DECODER_OPTIONS if name in options}
    if not options.pop("auto_decode", True):
        return None
    if not asked:
        return UNSET
    decoder = SampleDecoder(**asked, allow_code=allow_code)
    if encoder.decoder is not DECODE and encoder.decoder != decoder:
        raise ValueError(
            f"{next(iter(asked))} is given, but {type(encoder).__name__} has a decoder; set it "
            "there"
        )
    return decoder


def _check(encoder: Encoder, asked: Mapping[str, Any]) -> None:
    """Checks what training and validation have in common; `asked` may hold more."""
    check_encoder(encoder, asked["packing_buffer_size"])
    if not isinstance(asked["split_part"], str) or not asked["split_part"]:
        raise ValueError(
            f"split_part must be the name of a split, but is {shown(asked['split_part'])}"
        )
    if asked["worker_config"] is not None:
        check_worker_config(asked["worker_config"])
    for name in ("batch_size", "packing_buffer_size"):
        check_whole(name, asked[name], may_be_none=True)
    for name in ("batch_drop_last", "allow_code"):
        check_flag(name, asked[name])


def call_hook(hook: Callable[..., SavableDataset[Any]], **available: object) -> SavableDataset[Any]:
    """Calls a method that users override with those of the arguments that its signature takes.

    ValueError if it asks for others, or takes none of `_WITHOUT_EFFECT` that is given.
    """
    parameters = inspect.signature(hook).parameters.values()
    _check_takes(hook, parameters, available)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return hook(**available)
    return hook(**{p.name: available[p.name] for p in parameters if p.name in available})


def _check_takes(
    hook: Callable[..., Any],
    parameters: Collection[inspect.Parameter],
    available: Mapping[str, object],
) -> None:
    missing = [
        p.name
        for p in parameters
        if p.name not in available
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if missing:
        name = getattr(hook, "__qualname__", hook)
        raise ValueError(
            f"{name} asks for {shown(missing[0])}, which is none of {', '.join(available)}"
        )
    names = {p.name for p in parameters}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for given in () if takes_any else _WITHOUT_EFFECT:
        if available.get(given) is not None and given not in names:
            raise ValueError(
                f"{given} is given, but {hook.__qualname__} does not take it; add it to its "
                "signature"
            )
