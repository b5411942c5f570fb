"""mcore. Reads the weights of a checkpoint in megatron-core's format, and nothing else of it, in
any parallel layout.

This trainer writes such checkpoints, and so does Megatron-LM (`torch_dist`). megatron-core can only
load one as a whole, with its pickled options, and with all layers stacked in one tensor. So this
module calls the reader of torch beneath it, which reads the blocks of single parameters.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.packing.model.names import layer_prefix
from megatron.sft.base_exceptions import describe_failure, is_failure
from megatron.sft.model.checkpoints.files import CheckpointError, found_faults
from megatron.sft.model.checkpoints.read import CheckpointReader
from megatron.sft.model.checkpoints.unpickling import only_weights


class CheckpointWeights:
    """The weights of a checkpoint, and this rank's part of the model to fill with them. The
    checkpoint's `.metadata` must have passed `check_metadata`.
    """

    def __init__(
        self,
        checkpoint: Path,
        gpt: GPTModel,
        way_out: str = "pass another --pretrained-checkpoint",
    ) -> None:
        """Checks all files; collective. Raises CheckpointError, with the way out, if one is missing
        or was changed after it was saved.
        """
        if found := found_faults(checkpoint).faults:
            raise CheckpointError(f"{found[0]}; {way_out}")
        self._path, self._way_out = checkpoint, way_out
        self._reader = CheckpointReader(str(checkpoint))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._parameters: dict[str, Tensor] = dict(gpt.named_parameters())
        self._parameters |= {  # such as a router's bias
            name: buffer for name, buffer in gpt.named_buffers() if name in gpt.state_dict()
        }
        has_numbers = any(
            layer_prefix(key) is not None for key in self._metadata.state_dict_metadata
        )
        state = dict(gpt.sharded_state_dict(metadata={"non_homogeneous_layers": has_numbers}))
        # A factory stands for a parameter that checkpoints split in several tensors (gate and up
        # projection): apply_factories replaces it by these.
        apply_factories(state)
        self._blocks = {
            name: list(_tensors_in(entry))
            for name, entry in state.items()
            if name in self._parameters
        }
        self._held: list[str] = []

    def read_all(self, vocab_size: int) -> None:
        """Fills all parameters. Padding rows of the vocabulary that the checkpoint lacks become
        zero. Collective.

        Raises ValueError if they cannot be read, or, naming the tensor, if the checkpoint has
        another model or a vocabulary smaller than `vocab_size`.
        """
        blocks = [block for found in self._blocks.values() for block in found]
        for block in blocks:
            stored = self._metadata.state_dict_metadata.get(block.key)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(
                    f"{self._path} is of another model than the options: it has no {block.key}"
                )
            there, wanted = list(stored.size), list(block.global_shape)
            if block.allow_shape_mismatch:  # the vocabulary, whose padding depends on the layout
                if there[0] < vocab_size:
                    raise ValueError(
                        f"{self._path} has {there[0]} words in {block.key}, but there are "
                        f"{vocab_size}"
                    )
                block.data.detach().zero_()
                there = wanted[:1] + there[1:]
            if there != wanted:
                raise ValueError(
                    f"{self._path} is of another model than the options: {block.key} is "
                    f"{list(stored.size)} there, but {wanted} here"
                )
        self._read(blocks)

    def values_of(self, name: str) -> Tensor:
        """Returns the values of a parameter, reading its layer if necessary. The memory of the
        layer read before is freed, so that host memory holds one layer at a time.

        It is for a model on the CPU without initial weights, whose allocated memory the operating
        system has not yet provided.
        """
        if name not in self._held:
            self._hold(name)
        return self._parameters[name].detach()

    def _hold(self, name: str) -> None:
        for old in self._held:
            # The tensor stays, without memory: the model still refers to it.
            self._parameters[old].untyped_storage().resize_(0)
        prefix = layer_prefix(name)
        self._held = (
            [other for other in self._parameters if other.startswith(prefix)] if prefix else [name]
        )
        self._read([block for held in self._held for block in self._blocks[held]])

    def _read(self, blocks: list[ShardedTensor]) -> None:
        items, targets = [], {}
        for block in blocks:
            values = block.data.detach()
            # A layer that was saved in a stack of all layers is one row of it: [out, in] -> [1,
            # out, in].
            for _ in range(block.prepend_axis_num):
                values = values.unsqueeze(0)
            chunk = ChunkStorageMetadata(torch.Size(block.global_offset), values.shape)
            targets[MetadataIndex(block.key, chunk.offsets)] = values
            stored = self._metadata.state_dict_metadata[block.key]
            assert isinstance(stored, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(block.key, stored, [chunk])
            num_read = sum(item.lengths.numel() for item in found)
            # The padding of the vocabulary may differ from the checkpoint's.
            if num_read != values.numel() and not block.allow_shape_mismatch:
                raise ValueError(
                    f"the checkpoint holds {num_read} of {values.numel()} values of {block.key}"
                )
            items += found
        try:
            with only_weights(self._path / "*.distcp"):
                self._reader.read_data(LoadPlan(items), _Into(targets)).wait()
        except BaseException as error:  # of a dozen kinds, by what is damaged
            if not is_failure(error) or isinstance(error, (ValueError, torch.OutOfMemoryError)):
                raise
            raise ValueError(
                f"{self._path} cannot be read: {describe_failure(error)}; {self._way_out}"
            ) from error


def _tensors_in(entry: object) -> list[ShardedTensor]:
    """Returns the tensors of one parameter. megatron-core's checkpoints split some of them: the
    first layer of an MLP into gate and up.
    """
    if isinstance(entry, ShardedTensor):
        return [entry]
    if isinstance(entry, dict):
        return [tensor for part in entry.values() for tensor in _tensors_in(part)]
    assert isinstance(entry, (list, tuple)), entry
    return [tensor for part in entry for tensor in _tensors_in(part)]


class _Into(DefaultLoadPlanner):
    """Load planner that puts what is read into given tensors."""

    def __init__(self, targets: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._targets[MetadataIndex(index.fqn, index.offset)]
