"""pure. The nodes that a stream is made of, under one name.

leaf            the records of a source
choice          BlendDataset, ConcatDataset: several children
mapping         MapDataset, FilterDataset: single outputs
span            RepeatDataset, LimitDataset, EpochizeDataset, ShuffleBufferDataset: which positions, in which order
batching        BatchDataset, MixBatchDataset
group_batch     GroupBatchDataset
packing_buffer  PackingDataset
"""

from megatron.blending.batching import BatchDataset, MixBatchDataset
from megatron.blending.choice import BlendDataset, ConcatDataset
from megatron.blending.dataset import SavableDataset
from megatron.blending.group_batch import GroupBatchDataset
from megatron.blending.leaf import LeafDataset
from megatron.blending.mapping import FilterDataset, MapDataset
from megatron.blending.packing_buffer import PackingDataset
from megatron.blending.span import EpochizeDataset, LimitDataset, RepeatDataset, ShuffleBufferDataset

__all__ = [
    "BatchDataset",
    "BlendDataset",
    "ConcatDataset",
    "EpochizeDataset",
    "FilterDataset",
    "GroupBatchDataset",
    "LeafDataset",
    "LimitDataset",
    "MapDataset",
    "MixBatchDataset",
    "PackingDataset",
    "RepeatDataset",
    "SavableDataset",
    "ShuffleBufferDataset",
]
