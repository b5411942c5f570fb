"""From records in files to one resumable stream. Knows no tokens, no torch.distributed.

    load_dataset, get_train_dataset ...   load, dataset_loader: the functions that users begin with
      metadataset.yaml                    metadataset, metadataset_file, yaml_*: what is blended, as a tree of values
      folders and files                   sources, webdataset, jsonl, parquet, indexed, files: (source, index) -> record
      a record                            decode, field_map, loads, leaves, join, file_store: -> sample
      a sample                            task_encoder, default_encoder, cooking, seeding, samples, collate: -> batch
    BlendDataset, MapDataset ...          datasets: streams made of streams, any output by its position
      which comes next                    order, shares, planned, blend: functions of (seed, place, epoch, index)
      what is left out or packed          lane, failures
    get_loader, get_savable_loader        loader: ranks and workers, prefetch, state
    python -m megatron.blending prepare   prepare: the index files beside data

Names are imported when they are used: `import megatron.blending` costs nothing.
"""

import importlib
from typing import Any

_MODULES = {
    "loading.load": "get_train_dataset get_val_dataset get_val_datasets",
    "loading.dataset_loader": "DatasetLoader DatasetLoaderInterface Metadataset MetadatasetV2 load_dataset",
    "streams.datasets": """BatchDataset BlendDataset ConcatDataset EpochizeDataset FilterDataset GroupBatchDataset
        SourceDataset LimitDataset MapDataset MixBatchDataset PackingDataset RepeatDataset ShuffleBufferDataset""",
    "streams.node": "SavableDataset",
    "loading.loader": "WorkerConfig get_loader get_savable_loader",
    "streams.failures": "FatalSampleError SkipSample",
    "order.weights": "WeightSchedule",
    "encoding.default_encoder": "DefaultTaskEncoder",
    "encoding.task_encoder": "TaskEncoder",
    "encoding.cooking": "Cooker cooker",
    "encoding.seeding": "stateless",
    "formats.decode": "SampleDecoder",
    "encoding.samples": """Batch CaptioningSample CrudeSample ImageClassificationSample ImageSample InterleavedSample
        MultiChoiceVQASample OCRSample Sample SimilarityInterleavedSample TextSample VQASample VidQASample
        basic_sample_keys edataclass""",
    "encoding.source_info": "SourceInfo",
    "encoding.collate": """batch_list batch_pad_stack batch_stack concat_pad generic_batch generic_concat
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
        importlib.import_module(f"{__name__}.loading.loader")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
