"""From records in files to one resumable stream. Knows no tokens, no torch.distributed.

    formats        bytes on disk <-> records: files, prepared folders
    metadatasets   YAML -> a tree of frozen values; its source entries -> records
    order          pure: (seed, node, epoch, position) -> which source, which record; proportions of
                   blends
    streams        BlendDataset, MapDataset, ChunkDataset ...: what stands at each position
    loading        sources with weights; worker processes; the loader of chunks, whose state is
                   one number
    energon        for energon's users: sample types, cookers, task encoders, batches, packs and
                   groups, their loader, media, prepare
    python -m megatron.blending prepare   writes the index files beside data

Each folder knows those above it only; README.md beside this file is the map. Names are imported
when they are used: `import megatron.blending` costs nothing.
"""

import importlib
from typing import Any

_MODULES = {
    "energon._loading.load": "get_train_dataset get_val_dataset get_val_datasets",
    "energon._loading.dataset_loader": """DatasetLoader DatasetLoaderInterface Metadataset
        MetadatasetV2 load_dataset""",
    "loading.sources": "DatasetBlendMode LoadedDataset LoadedDatasetList",
    "energon._streams.batching": "BatchDataset MixBatchDataset",
    "streams.choice": "BlendDataset ConcatDataset",
    "energon._streams.group_batch": "GroupBatchDataset",
    "streams.mapping": "FilterDataset MapDataset",
    "energon._streams.packing_buffer": "PackingDataset",
    "streams.positions": "EpochizeDataset LimitDataset RepeatDataset ShuffleBufferDataset",
    "streams.source": "SourceDataset",
    "streams.chunk": "ChunkDataset SkippedSample",
    "streams.node": "SavableDataset",
    "energon._loading.loader": "WorkerConfig get_loader get_savable_loader",
    "streams.failures": "FatalSampleError SkipSample log_exception reraise_exception",
    "order.weights": "WeightSchedule",
    "energon._encoding.default_encoder": "DefaultTaskEncoder",
    "energon._encoding.task_encoder": "TaskEncoder",
    "energon._encoding.cooking": "Cooker cooker",
    "streams.seeding": "stateless",
    "energon._encoding.decode": "SampleDecoder",
    "energon._encoding.samples": """Batch CaptioningSample CrudeSample
        ImageClassificationSample ImageSample
        InterleavedSample MultiChoiceVQASample OCRSample Sample SimilarityInterleavedSample
        TextSample VQASample VidQASample
        basic_sample_keys edataclass""",
    "energon._encoding.source_info": "SourceInfo",
    "energon._encoding.collate": """batch_list batch_pad_stack batch_stack concat_pad generic_batch
    generic_concat
        homogeneous_concat_mix""",
    "formats.sources": "RecordError RecordSource open_source",
    "formats.prepared.webdataset": "open_webdataset",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    module = _PLACES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module.startswith("streams."):
        # Iterating over a data set makes a loader.
        importlib.import_module(f"{__name__}.energon._loading.loader")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
