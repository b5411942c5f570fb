"""pure. The nodes that a stream is made of, under one name.

leaf            the records of a source
choice          BlendDataset, ConcatDataset: several children
mapping         MapDataset, FilterDataset: single outputs
span            RepeatDataset, LimitDataset, EpochizeDataset, ShuffleBufferDataset: which positions, in which order
batching        BatchDataset, MixBatchDataset
group_batch     GroupBatchDataset
packing_buffer  PackingDataset
"""

from megatron.blending.streams.batching import BatchDataset, MixBatchDataset
from megatron.blending.streams.choice import BlendDataset, ConcatDataset
from megatron.blending.streams.group_batch import GroupBatchDataset
from megatron.blending.streams.mapping import FilterDataset, MapDataset
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.packing_buffer import PackingDataset
from megatron.blending.streams.positions import EpochizeDataset, LimitDataset, RepeatDataset, ShuffleBufferDataset
from megatron.blending.streams.source import SourceDataset

__all__ = [
    "BatchDataset",
    "BlendDataset",
    "ConcatDataset",
    "EpochizeDataset",
    "FilterDataset",
    "GroupBatchDataset",
    "LimitDataset",
    "MapDataset",
    "MixBatchDataset",
    "PackingDataset",
    "RepeatDataset",
    "SavableDataset",
    "ShuffleBufferDataset",
    "SourceDataset",
]
