"""mcore. megatron-core's GPTModel as a subject: each pipeline stage, and each tensor-, context- and
expert-parallel rank, whoever trains it by megatron-core's schedules.

Every rank calls it alike. Logits come from the script's own forward step without labels, so that
what it packs and passes on is what is examined; the step is that of the script's optimizer, with
clipping off and each of its inner optimizers replaced by SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from megatron.packing.doctor.subject import Ranks, Sample, Step, Subject
from megatron.packing.model.attention.zigzag import shard_index

NO_CLIPPING = 1e30
"""Clips nothing, and lets megatron-core compute the norm all the same."""


class Microbatches(NamedTuple):
    """What megatron-core's schedules take."""

    data_iterator: Any
    num_microbatches: int = 1


class Trained(NamedTuple):
    """What a script knows after the passes of a step."""

    losses: list[Any]
    """Result of megatron-core's forward-backward function."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """As in `subject.Step`."""


@dataclass(frozen=True, kw_only=True)
class GPTScript:
    """A script that trains a GPTModel, as the doctor needs it."""

    name: str
    model: Sequence[nn.Module]
    """Chunks of this rank, in DistributedDataParallel: one, or one for each virtual stage."""
    vocab_size: int
    forward_step: Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]
    """As megatron-core's schedules call it."""
    pack: Callable[[Sequence[Tensor], int], Microbatches]
    """Takes token ids, int64 [length] of each sequence, and a token for padding. Returns one
    microbatch of all of them.
    """
    alignment: tuple[int, int] = (1, 1)
    """Multiples to which each sequence, and the pack, are padded."""
    train: Callable[[Sequence[Sequence[Sample]]], Trained] | None = None
    """Takes packs of samples, the same on all ranks. Runs the passes of one step on all of them."""
    optimizer: MegatronOptimizer | None = None
    report_loss: Callable[[list[Any]], float] | None = None
    """Takes the results of the passes, and returns the loss that the script reports. Collective."""
    windows: Sequence[int] = ()
    """Tokens that each layer of the model sees, itself included; 0 for all (default: unknown)."""
    schedule: Callable[[], Callable[..., Any]] | None = None
    """Returns megatron-core's forward-backward function, as the script has it (default: without
    what a plug-in put around it, as packs are made already).
    """
    takes_weights: bool = True
    balances: bool = False
    has_further_losses: bool = False


def subject_from_gpt(script: GPTScript) -> Subject:
    """Returns the script as a subject. Collective over all ranks."""
    passes = _Passes(script)
    stepping = _Stepping(script)
    embedding = next(
        (
            gpt.embedding
            for gpt in passes.gpts
            if getattr(gpt, "pre_process", False) and hasattr(gpt, "embedding")
        ),
        None,
    )
    is_alone = dist.get_world_size() == 1
    return Subject(
        name=script.name,
        model=nn.ModuleDict(passes.stages),
        vocab_size=script.vocab_size,
        logits=passes.logits,
        places=passes.places,
        num_slots=passes.num_slots,
        embedding=embedding,
        windows=passes.windows(),
        shards=passes.shards,
        backward=passes.backward,
        step=None if script.train is None or script.optimizer is None else stepping.step,
        move=stepping.move,
        takes_weights=script.takes_weights,
        balances=script.balances,
        has_further_losses=script.has_further_losses,
        ranks=None if is_alone else Ranks(gather=_gather, is_first=dist.get_rank() == 0),
        num_copies={
            "context-parallel ranks": parallel_state.get_context_parallel_world_size(),
            "data-parallel ranks": parallel_state.get_data_parallel_world_size(),
            "tensor-parallel ranks": parallel_state.get_tensor_model_parallel_world_size(),
        },
    )


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class _Passes:
    """Forward and backward passes of one pack."""

    def __init__(self, script: GPTScript) -> None:
        self._script = script
        self.gpts: list[Any] = [unwrap_model(chunk) for chunk in script.model]
        self._config = get_model_config(script.model[0])
        stage = parallel_state.get_pipeline_model_parallel_rank()
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.stages = {
            f"stage{number * num_stages + stage}": gpt for number, gpt in enumerate(self.gpts)
        }

    def windows(self) -> dict[str, int]:
        """Returns the declared windows of this rank's layers, by their names."""
        return {
            f"{stage}.decoder.layers.{index}": self._script.windows[layer.layer_number - 1]
            for stage, gpt in self.stages.items()
            if self._script.windows
            for index, layer in enumerate(gpt.decoder.layers)
            if self._script.windows[layer.layer_number - 1]
        }

    def _padded(self, sequences: Sequence[Tensor]) -> list[int]:
        """Returns the rows of each sequence, padding behind it included, and those of the tail."""
        unit, of_pack = self._script.alignment
        padded = [-(-len(tokens) // unit) * unit for tokens in sequences]
        return [*padded, -sum(padded) % of_pack]

    def places(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        padded = self._padded(sequences)
        starts = [sum(padded[:index]) for index in range(len(sequences))]
        return [torch.arange(start, start + len(s)) for start, s in zip(starts, sequences)]

    def num_slots(self, sequences: Sequence[Tensor]) -> int:
        return sum(self._padded(sequences))

    def shards(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows of this context-parallel rank, and its tensor-parallel rank's part."""
        size = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        padded = self._padded(sequences)
        index = shard_index(tuple(padded), size, rank)
        rows = torch.arange(sum(padded)) if index is None else index
        if not self._config.sequence_parallel:
            return [rows]
        parts = rows.chunk(parallel_state.get_tensor_model_parallel_world_size())
        return [rows, parts[parallel_state.get_tensor_model_parallel_rank()]]

    def logits(self, sequences: Sequence[Tensor], fill: int) -> list[Tensor]:
        """Returns the logits of each sequence, the same on all ranks."""
        found: list[Tensor] = []

        def keep(logits: Tensor) -> Tensor:
            found.append(logits.detach())
            return logits.sum() * 0

        self._run(sequences, fill, keep, forward_only=True)
        part: tuple[Tensor, Tensor] | None = None
        if found and parallel_state.get_tensor_model_parallel_rank() == 0:
            part = self._rows(found[0]), self.shards(sequences)[0]
        parts = [part] if dist.get_world_size() == 1 else _gather(part)
        whole = torch.empty(0)
        for rows, index in filter(None, parts):
            if not len(whole):
                whole = rows.new_zeros(self.num_slots(sequences), rows.shape[1])
            whole[index] = rows
        return [whole[places] for places in self.places(sequences)]

    def _rows(self, logits: Tensor) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])[:, : self._script.vocab_size]
        return rows.detach().float().cpu() if rows.dtype == torch.bfloat16 else rows.detach().cpu()

    def backward(self, sequences: Sequence[Tensor], index: int, only_last: bool) -> None:
        """Runs the pack, and goes back from the logits of one sequence, or of its last token."""
        places = self.places(sequences)[index]
        mine = torch.isin(self.shards(sequences)[0], places[-1:] if only_last else places)

        def pull(logits: Tensor) -> Tensor:
            rows = logits.reshape(-1, logits.shape[-1])[mine.to(logits.device)].float()
            weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(6))
            return (rows * weights.to(rows)).sum()

        with ExitStack() as stack:
            for chunk in self._script.model:
                stack.enter_context(chunk.no_sync())  # type: ignore[operator]
            stack.enter_context(mock.patch.object(self._config, "no_sync_func", None))
            stack.enter_context(
                mock.patch.object(self._config, "finalize_model_grads_func", _leave_gradients)
            )
            self._run(sequences, 0, pull, forward_only=False)
        for chunk in self._script.model:
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def _run(
        self,
        sequences: Sequence[Tensor],
        fill: int,
        use: Callable[[Tensor], Tensor],
        *,
        forward_only: bool,
    ) -> None:
        """Runs the script's forward step without labels; `use` makes a scalar of the logits."""
        seed = torch.initial_seed()
        tensor_parallel.model_parallel_cuda_manual_seed(seed % 2**31)
        torch.manual_seed(seed)
        batches = self._script.pack(sequences, fill)

        def loss(output: Tensor) -> tuple[Any, ...]:
            total = use(output)
            if getattr(self._config, "calculate_per_token_loss", False):
                return total, torch.ones((), dtype=torch.int32, device=total.device), {}
            return total, {}

        def step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            output, _ = self._script.forward_step(data_iterator, model)
            return output, loss

        chunks = self._script.model
        with _without_labels(self.gpts), mock.patch.object(self._config, "moe_aux_loss_coeff", 0.0):
            (self._script.schedule or _schedule)()(
                forward_step_func=step,
                data_iterator=batches.data_iterator,
                model=list(chunks) if len(chunks) > 1 else chunks[0],
                num_microbatches=batches.num_microbatches,
                seq_length=self.num_slots(sequences),
                micro_batch_size=1,
                forward_only=forward_only,
            )


def _leave_gradients(*_: Any, **__: Any) -> None:
    """Stands in for what sums gradients over ranks."""


def _schedule() -> Callable[..., Any]:
    """Returns megatron-core's function, without what a plug-in put around it: packs are made."""
    function = get_forward_backward_func()
    return getattr(function, "plain", function)


@contextmanager
def _without_labels(gpts: Sequence[Any]) -> Iterator[None]:
    """Lets models put out all logits, within the block, whatever they are given.

    Layers that predict further tokens rest meanwhile: they have no logits without labels.
    """

    def drop(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "labels": None, "runtime_gather_output": True}

    with ExitStack() as stack:
        for gpt in gpts:
            handle = gpt.register_forward_pre_hook(drop, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
            if getattr(gpt, "mtp_process", False):
                weight = None
                if gpt.share_embeddings_and_output_weights:  # its place depends on `mtp_process`
                    weight = gpt.shared_embedding_or_output_weight()
                stack.enter_context(mock.patch.object(gpt, "mtp_process", False))
                if weight is not None:
                    stack.enter_context(
                        mock.patch.object(
                            gpt, "shared_embedding_or_output_weight", return_value=weight
                        )
                    )
            stack.enter_context(mock.patch.object(gpt.config, "mtp_num_layers", None))
        yield


class _Stepping:
    """The script's optimizer step, by SGD."""

    def __init__(self, script: GPTScript) -> None:
        self._script = script
        self._saved: dict[str, Tensor] = {}
        """Parameter of an inner optimizer, as `_sgd` names it -> its values before the step."""

    def step(self, packs: Sequence[Sequence[Sample]]) -> Step:
        """Runs the passes of all packs, and the optimizer without moving the weights."""
        script = self._script
        assert script.train is not None
        assert script.optimizer is not None
        for chunk in script.model:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        script.optimizer.zero_grad()
        trained = script.train(packs)
        loss = None if script.report_loss is None else script.report_loss(trained.losses)
        self._saved.clear()
        update, norm = self._update(0.0)
        return Step(
            change=update.change,
            loss=loss,
            norm=norm,
            replicas=trained.replicas,
            copies=self._copies(),
        )

    def _copies(self) -> dict[str, str]:
        """Returns the parameters that tensor-parallel ranks hold copies of, as `_sgd` names them.

        Shards of a distributed optimizer are of one rank of a replica: they have no names here.
        """
        names = {
            held: f"stage {parallel_state.get_pipeline_model_parallel_rank()}: {name}"
            for chunk in self._script.model
            for name, parameter in unwrap_model(chunk).named_parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
            and getattr(parameter, "allreduce", True)
            and not getattr(parameter, "main_param_sharded", False)
            for held in (parameter, getattr(parameter, "main_param", None))
        }
        optimizer = self._script.optimizer
        return {
            f"{number}.{group}.{place}": names[parameter]
            for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer]))
            if part.optimizer is not None
            for group, settings in enumerate(part.optimizer.param_groups)
            for place, parameter in enumerate(settings["params"])
            if parameter in names
        }

    def move(self, factor: float) -> dict[str, Tensor]:
        """Moves the weights along the last step's gradients, which are still in their buffers."""
        update, _ = self._update(factor)
        return update.moved

    def _update(self, factor: float) -> tuple[_Update, float | None]:
        optimizer = self._script.optimizer
        assert optimizer is not None
        norm: Any = None
        update = _Update(factor, self._saved, self._dtypes())
        with ExitStack() as stack:
            for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
                inner = part.optimizer
                if inner is not None:
                    stack.enter_context(
                        mock.patch.object(inner, "step", update.of(inner, f"{number}"))
                    )
                stack.enter_context(mock.patch.object(part.config, "clip_grad", NO_CLIPPING))
            stack.enter_context(mock.patch.object(optimizer.config, "clip_grad", NO_CLIPPING))
            _, norm, _ = optimizer.step()
        for chunk in self._script.model:
            if hasattr(chunk, "start_param_sync") and getattr(
                chunk.ddp_config, "overlap_param_gather", False
            ):
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
        return update, None if norm is None else float(norm)

    def _dtypes(self) -> dict[Tensor, torch.dtype]:
        """Returns main parameters -> precision of the model's own, to which they are rounded."""
        return {
            main: parameter.dtype
            for chunk in self._script.model
            for parameter in unwrap_model(chunk).parameters()
            if (main := getattr(parameter, "main_param", None)) is not None
        }


class _Update:
    """One step that sets what optimizers hold to its saved values and a multiple of the gradients.

    The first step after a training step saves the values.
    """

    def __init__(
        self, factor: float, saved: dict[str, Tensor], dtypes: dict[Tensor, torch.dtype]
    ) -> None:
        self._factor, self._saved, self._dtypes = factor, saved, dtypes
        self.change: dict[str, Tensor] = {}
        """Gradients."""
        self.moved: dict[str, Tensor] = {}
        """What is added to the model's weights, as they round it."""

    def of(self, inner: Any, name: str) -> Callable[..., None]:
        """Returns the step of one inner optimizer."""

        @torch.no_grad()
        def step(closure: Any = None) -> None:
            for group, settings in enumerate(inner.param_groups):
                for place, parameter in enumerate(settings["params"]):
                    gradient = getattr(parameter, "decoupled_grad", None)
                    gradient = parameter.grad if gradient is None else gradient
                    if gradient is not None:
                        self._move(f"{name}.{group}.{place}", parameter, gradient)

        return step

    def _move(self, key: str, parameter: Tensor, gradient: Tensor) -> None:
        saved = self._saved.setdefault(key, parameter.detach().clone())
        self.change[key] = gradient.detach().clone()
        parameter.copy_(saved + self._factor * gradient.to(parameter))
        dtype = self._dtypes.get(parameter, parameter.dtype)
        self.moved[key] = parameter.to(dtype).double() - saved.to(dtype).double()
