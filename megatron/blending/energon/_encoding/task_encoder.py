"""pure. TaskEncoder: the class that a user overrides to cook, encode, pack and batch samples.

Each step that is overridden becomes a node of the stream. The others are left out, except `batch`,
which collates wherever `batch_size` is given.

Steps in the order in which they run:

    step                      runs                                  input -> output
    a cooker                  for crude sources                     parts of a record -> sample
    encode_sample             for each sample                       sample -> encoded sample
    preencode_sample          in place of encode_sample             sample -> sample to choose by
    select_samples_to_pack    with packing_buffer_size              samples of a block -> groups
    postencode_sample         for each sample, after it is chosen   sample -> encoded sample
    pack_selected_samples     with packing_buffer_size              group -> pack
    batch                     with batch_size, or by groups         encoded samples -> batch
    encode_batch              for each batch                        batch -> input of the loop

"By groups" means that `batch_group_criterion` is overridden. With `pack_by = "lengths"` samples are
encoded after they are chosen: `encode_sample` then runs just before `postencode_sample`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from megatron.blending.arguments import check_one_of
from megatron.blending.energon._encoding.collate import generic_batch
from megatron.blending.energon._encoding.cooking import DECODE, Cooker
from megatron.blending.energon._encoding.fields import batch_samples, has_fields
from megatron.blending.energon._streams.batching import BatchDataset
from megatron.blending.energon._streams.group_batch import MAX_OPEN_GROUPS, GroupBatchDataset
from megatron.blending.energon._streams.packing_buffer import PackingDataset
from megatron.blending.order.proportions import BlendMode
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.choice import BlendDataset, ConcatDataset
from megatron.blending.streams.mapping import MapDataset
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.positions import EpochizeDataset, LimitDataset, RepeatDataset
from megatron.blending.streams.seeding import BATCH_INDEX, SAMPLE_INDEX
from megatron.blending.streams.worker_config import WorkerConfig

T_sample = TypeVar("T_sample")
T_encoded_sample = TypeVar("T_encoded_sample")
T_raw_batch = TypeVar("T_raw_batch")
T_batch = TypeVar("T_batch")


class TaskEncoder(Generic[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Base of task encoders: override the steps that the task needs. Loader workers call them for
    each sample or batch.

        class Words(DefaultTaskEncoder):
            def encode_sample(self, sample):
                return {"words": sample["json"]["text"].split()}

        dataset = get_train_dataset(
            "texts.jsonl", task_encoder=Words(), batch_size=2, worker_config=WorkerConfig()
        )
        next(iter(get_loader(dataset)))["words"]    ->    [["three"], ["one", "two"]]
    """

    cookers: Sequence[Cooker] = ()
    decoder: Any = DECODE
    over_long: str = "drop"
    """Treatment of samples that fit in no pack: "drop" (log and count them), "alone" (a pack of one
    sample) or "error".
    """
    pack_by: str = "samples"
    """Values that `select_samples_to_pack` chooses from: "samples", the encoded samples of a block,
    or "lengths", the ints that `sample_length` returns for them. With lengths, a sample is encoded
    when its pack is made, so that only one pack is in memory.
    """
    max_open_groups: int = MAX_OPEN_GROUPS
    """Maximum number of groups of `batch_group_criterion` that a rank keeps open. Beyond it, the
    oldest group becomes a batch before it is full.
    """

    def encode_sample(self, sample: T_sample) -> T_encoded_sample:
        """Returns the encoded sample, from which the model's input is made. It may raise SkipSample
        to leave the sample out. As a generator it may yield several samples.
        """
        return sample  # type: ignore[return-value]

    def preencode_sample(self, sample: T_sample) -> Any:
        """Returns the sample for `select_samples_to_pack`: the cheap part of encoding, for tasks
        that pack. `postencode_sample` does the rest for samples that were chosen.
        """
        return sample

    def sample_length(self, sample: T_sample) -> int:
        """Returns the approximate length of a sample before it is encoded; for `pack_by =
        "lengths"`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define sample_length")

    def postencode_sample(self, sample: Any) -> T_encoded_sample:
        """Returns the encoded sample, from one that `preencode_sample` returned and that was
        chosen.
        """
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Returns groups of these samples; each becomes a pack. Samples in no group are offered
        again, together with the rest of their block.
        """
        raise NotImplementedError(f"{type(self).__name__} must define select_samples_to_pack")

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Returns the pack of a group: one sample."""
        raise NotImplementedError(f"{type(self).__name__} must define pack_selected_samples")

    def batch_group_criterion(self, sample: Any) -> tuple[Hashable, int | None]:
        """Returns (key, batch size). Only samples with the same key share a batch. None as the
        batch size stands for the one that the user asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} must define batch_group_criterion")

    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Returns a batch of the same class as the samples. Tensors are padded and stacked, other
        values become lists.
        """
        return self._batch(samples, type(samples[0]))

    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Returns the batch for the training loop."""
        return batch  # type: ignore[return-value]

    def num_tokens(self, sample: T_encoded_sample) -> int:
        """Returns the length of an encoded sample, for blend weights in tokens. By default it is
        the length of its `tokens`.
        """
        tokens = (
            sample.get("tokens") if isinstance(sample, Mapping) else getattr(sample, "tokens", None)
        )
        if tokens is None:
            raise NotImplementedError(
                f"{type(self).__name__} must define num_tokens: its samples have no 'tokens'"
            )
        return len(tokens)

    @property
    def current_batch_index(self) -> int:
        """Number of the output that is being made, counted on its rank; equal on all ranks. With
        packing, or if outputs are left out, it is the number of the block or the position.
        """
        return _current(
            BATCH_INDEX,
            "current_batch_index is known while a loader makes an output, in its methods",
        )

    @property
    def current_sample_index(self) -> int:
        """Position of the current sample in the stream of its source; of several samples that of
        the first.
        """
        return _current(
            SAMPLE_INDEX,
            "current_sample_index is known in methods with @stateless(restore_seeds=True); a "
            "sample's own `__restore_key__` says in any where it stands",
        )

    def uses(self, step: str) -> bool:
        """Returns whether the method `step` is overridden, in the class or on the object."""
        return step in vars(self) or getattr(type(self), step) is not getattr(TaskEncoder, step)

    def _batch(
        self,
        samples: list[Any],
        result_type: object,
        actions: Mapping[str, Callable[[list[Any]], Any]] | None = None,
        default_action: Callable[[list[Any]], Any] = generic_batch,
    ) -> Any:
        """Returns a batch of the class `result_type`. `actions` maps names of fields to functions
        from the samples' values to the batch's value.
        """
        if not has_fields(result_type):
            return default_action(samples)
        return batch_samples(samples, result_type, actions or {}, default_action)

    # The methods below put the steps into a stream. Most tasks leave them as they are.

    def build_encode_sample(
        self, dataset: SavableDataset[Any], *, worker_config: WorkerConfig | None = None
    ) -> SavableDataset[Any]:
        """Returns `dataset` with its samples encoded."""
        check_encoder(self)
        step = self._encoding_step()
        if step is None:
            return dataset
        return MapDataset(dataset, map_fn=getattr(self, step), worker_config=worker_config)

    def _encoding_step(self) -> str | None:
        steps = ("encode_sample", "preencode_sample")
        return next((step for step in steps if self.uses(step)), None)

    def build_packing(
        self,
        dataset: SavableDataset[Any],
        *,
        packing_buffer_size: int | None,
        worker_config: WorkerConfig | None = None,
    ) -> SavableDataset[Any]:
        """Returns `dataset` packed; without `packing_buffer_size` only `postencode_sample` runs."""
        check_encoder(self, packing_buffer_size)
        post_encode = self.postencode_sample if self.uses("postencode_sample") else None
        if packing_buffer_size is None:
            if post_encode is None:
                return dataset
            return MapDataset(dataset, map_fn=post_encode, worker_config=worker_config)
        is_by_length = self.pack_by == "lengths"
        if is_by_length and self._is_encoded_by_self(dataset):
            # build_encode_sample has added a node that encodes every sample. With lengths, only
            # chosen samples are encoded, so remove that node and encode when a pack is made.
            dataset = dataset.children[0]
            post_encode = self._encode_whole
        return PackingDataset(
            dataset,
            buffer_size=packing_buffer_size,
            pre_packer=self.select_samples_to_pack,
            final_packer=self.pack_selected_samples,
            sample_encoder=post_encode,
            length_of=self.sample_length if is_by_length else None,
            over_long=self.over_long,
            worker_config=worker_config,
        )

    def _is_encoded_by_self(self, dataset: SavableDataset[Any]) -> bool:
        """Returns whether `dataset` is the node that `build_encode_sample` adds."""
        step = self._encoding_step()
        # `==` and not `is`: each access to a bound method creates a new object.
        return (
            isinstance(dataset, MapDataset)
            and step is not None
            and dataset.map_fn == getattr(self, step)
        )

    def _encode_whole(self, sample: Any) -> Any:
        """Returns the encoded sample, by all encoding steps at once (`pack_by = "lengths"`)."""
        step = self._encoding_step()
        encoded = sample if step is None else getattr(self, step)(sample)
        return self.postencode_sample(encoded) if self.uses("postencode_sample") else encoded

    def build_batch(
        self,
        dataset: SavableDataset[Any],
        *,
        batch_size: int | None = None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> SavableDataset[Any]:
        """Returns `dataset` packed and batched. With `batch_size=None` its outputs are single
        samples or packs.

        If no step has changed the samples yet, they are encoded first. An overridden
        `build_train_datasets` may therefore blend and call this method only.
        """
        if not has_changed_outputs(dataset):
            dataset = self.build_encode_sample(dataset, worker_config=worker_config)
        dataset = self.build_packing(
            dataset, packing_buffer_size=packing_buffer_size, worker_config=worker_config
        )
        if self.uses("batch_group_criterion"):
            dataset = GroupBatchDataset(
                dataset,
                sample_group_key=self.batch_group_criterion,
                batcher=self.batch,
                fixed_batch_size=batch_size,
                drop_last=batch_drop_last,
                max_open_groups=self.max_open_groups,
                worker_config=worker_config,
            )
        elif batch_size is None:
            # Single samples are no batches, so `encode_batch` does not apply to them.
            return dataset
        else:
            dataset = BatchDataset(
                dataset,
                batch_size,
                batcher=self.batch,
                drop_last=batch_drop_last,
                worker_config=worker_config,
            )
        if self.uses("encode_batch"):
            dataset = MapDataset(dataset, map_fn=self.encode_batch, worker_config=worker_config)
        return dataset

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[Any],
        worker_config: WorkerConfig | None = None,
        batch_size: int | None = None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        blend_mode: str = "none",
        proportions: BlendMode = "exact",
        weight_schedule: WeightSchedule | None = None,
        repeat: bool = True,
    ) -> SavableDataset[Any]:
        """Returns the training stream. An override may take any of these arguments: it is called
        with those in its signature.

        datasets: the sources in the order of the metadataset, each as (dataset, weight). They are
            endless if `repeat`. With the blend mode "sample_repetitions" each has one epoch, and
            weights that make all of them end together.
        """
        dataset = datasets[0][0]
        if len(datasets) > 1:
            dataset = BlendDataset(
                *datasets, mode=proportions, schedule=weight_schedule, worker_config=worker_config
            )
        # Repeat the blend and not its sources: then each epoch of the blend has the given number of
        # repetitions of each source.
        if repeat and blend_mode == "sample_repetitions":
            dataset = RepeatDataset(dataset, worker_config=worker_config)
        dataset = self._in_batches(
            dataset, worker_config, batch_size, batch_drop_last, packing_buffer_size
        )
        # At the end, so that a virtual epoch counts batches and not samples.
        if virtual_epoch_length > 0:
            dataset = EpochizeDataset(
                dataset, length=virtual_epoch_length, worker_config=worker_config
            )
        return dataset

    def build_val_datasets(
        self,
        *,
        datasets: Sequence[Any],
        worker_config: WorkerConfig | None = None,
        batch_size: int | None = None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        limit: int | None = None,
    ) -> SavableDataset[Any]:
        """Returns the validation stream: the sources one after the other, at most `limit` batches.
        Weights are ignored.
        """
        first = datasets[0][0]
        dataset = (
            first
            if len(datasets) == 1
            else ConcatDataset(*(d for d, _ in datasets), worker_config=worker_config)
        )
        dataset = self._in_batches(
            dataset, worker_config, batch_size, batch_drop_last, packing_buffer_size
        )
        if limit is not None and limit > 0:
            dataset = LimitDataset(
                dataset, length=limit, reset_after_epoch=True, worker_config=worker_config
            )
        return dataset

    def _in_batches(
        self,
        dataset: SavableDataset[Any],
        worker_config: WorkerConfig | None,
        batch_size: int | None,
        batch_drop_last: bool,
        packing_buffer_size: int | None,
    ) -> SavableDataset[Any]:
        """Returns `dataset` encoded and batched, by the two methods that users override."""
        return self.build_batch(
            self.build_encode_sample(dataset, worker_config=worker_config),
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )


def check_encoder(encoder: object, packing_buffer_size: int | None = None) -> None:
    """Raises ValueError, naming the method, if a step is missing, or two exclude each other."""
    if isinstance(encoder, type):
        raise ValueError(
            f"task_encoder must be an object, but is the class {encoder.__name__}; pass an "
            "instance of it"
        )
    name = type(encoder).__name__
    if not isinstance(encoder, TaskEncoder):
        raise ValueError(
            f"task_encoder must be a TaskEncoder, but is a {name}; derive it from "
            "DefaultTaskEncoder"
        )
    if encoder.uses("encode_sample") and encoder.uses("preencode_sample"):
        raise ValueError(f"{name} defines encode_sample and preencode_sample; keep one")
    if packing_buffer_size is None:
        return
    check_one_of(f"{name}.pack_by", encoder.pack_by, ("samples", "lengths"))
    lengths = ("sample_length",) if encoder.pack_by == "lengths" else ()
    for step in ("select_samples_to_pack", "pack_selected_samples", *lengths):
        if not encoder.uses(step):
            raise ValueError(
                f"packing_buffer_size is {packing_buffer_size}, but {name} has no {step}; define it"
            )


def _current(index: ContextVar[int | None], otherwise: str) -> int:
    found = index.get()
    if found is None:
        raise RuntimeError(otherwise)
    return found


def has_changed_outputs(dataset: SavableDataset[Any]) -> bool:
    """Returns whether a node of the stream maps, batches or packs samples."""
    return dataset.changes_outputs or any(map(has_changed_outputs, dataset.children))
