"""mcore. Layers whose widest products are computed for a chunk of the tokens at a time.

    MLP         x -> for each chunk: its MLP -> out     in the backward pass again for each chunk
    experts     behind the router: to experts, through them and back, and shared experts
    attention   linear_qkv and linear_proj, for each chunk
    embedding   words of each chunk

What lies between an MLP's products is its widest activation. A tiled MLP keeps its input alone; the
backward pass runs each chunk again, and then backward. Gradients of weights are summed over chunks
in float32 before autograd is given them once, so that hooks of overlapped reduction run once.

Under sequence parallel the products of attention gather the tokens of all tensor-parallel ranks,
and the backward pass their gradients: in chunks these exist for one of them. So does the embedding,
of which each rank has some words of all tokens. Nothing is computed twice.

The router chooses for all tokens at once, so that its losses stay what they are. Experts of other
ranks are reached chunk by chunk: each rank has as many chunks, of which some may be empty.

Price of a tiled MLP: its forward pass once more, but where the whole layer is recomputed: there the
output of the second pass is read by nobody, and is not computed. The idea is that of ALST's
TiledMLP (arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    random,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.packing.model.activation_options import ActivationOptions

_PRODUCTS = (
    *("linear_qkv", "linear_qk", "linear_proj"),
    *("linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"),  # of latent attention
)
"""Products of attention that may take or give tokens split over tensor parallel."""


def tile_layers(gpt: GPTModel, *, is_random: bool = False) -> None:
    """Tiles the layers of `gpt` as the `ActivationOptions` of its config say; before the model is
    wrapped.

    is_random: MLPs draw random numbers, as adapters with dropout do.
    """
    options = ActivationOptions.of(gpt.config)
    of_decoder = set(gpt.decoder.layers)
    words = getattr(getattr(gpt, "embedding", None), "word_embeddings", None)
    if options.attention_chunks_for_training > 1 and getattr(
        words, "reduce_scatter_embeddings", False
    ):
        _tile_embedding(words, options.attention_chunks_for_training)
    for layer in (one for one in gpt.modules() if isinstance(one, TransformerLayer)):
        tile: Callable[[Any, Tiles], None] | None = None
        if options.mlp_chunks_for_training > 1:
            has_experts = isinstance(layer.mlp, MoELayer)
            tile = _tile_experts if has_experts else _tile_mlp if type(layer.mlp) is MLP else None
        if tile is not None:
            is_last = layer in of_decoder and _is_recomputed_alone(gpt.config) and not is_random
            is_unread = is_last and _adds_alone(layer.mlp_bda)
            tile(
                layer.mlp,
                Tiles(options.mlp_chunks_for_training, is_random=is_random, is_unread=is_unread),
            )
            if is_unread:
                layer.register_forward_hook(_empty_unread)
        if options.attention_chunks_for_training > 1:
            for name in _PRODUCTS:
                linear: Any = getattr(layer.self_attention, name, None)
                if getattr(linear, "sequence_parallel", False) and linear.tp_group.size() > 1:
                    _tile_linear(linear, options.attention_chunks_for_training)


def _is_recomputed_alone(config: Any) -> bool:
    """Returns whether a layer that is recomputed is so without a layer behind it."""
    is_alone = config.recompute_method == "block" or config.recompute_num_layers == 1
    return config.recompute_granularity == "full" and is_alone


def _adds_alone(residual: Any) -> bool:
    """Returns whether no gradient depends on the values that are added to the residual stream."""
    return getattr(residual, "norm", None) is None and getattr(residual, "scalar", None) is None


class Tiles(NamedTuple):
    """How a module is computed in chunks."""

    num_chunks: int
    is_random: bool
    is_unread: bool
    """True if nobody reads the output in a recomputation of its layer."""
    is_exchanged: bool = False
    """True if ranks with other numbers of tokens take part, also in chunks that are empty here."""

    def parts(self, num_tokens: int) -> list[slice]:
        """Returns the chunks of so many tokens: 5 in 2 chunks -> 0:2, 2:5; 1 -> 0:1, or exchanged
        0:0, 0:1.
        """
        ends = [num_tokens * n // self.num_chunks for n in range(self.num_chunks + 1)]
        pairs = [one for one in pairwise(ends) if one[0] < one[1] or self.is_exchanged]
        return [slice(*one) for one in pairs]


def _empty_unread(layer: object, inputs: object, outputs: tuple[Tensor, Any]) -> None:
    """Frees the output of a layer that is recomputed: it is the root of the backward pass, which
    needs its shape alone.
    """
    if _is_recomputed() and outputs[0].requires_grad:
        outputs[0].data = _shaped_as(outputs[0])


def _shaped_as(x: Tensor) -> Tensor:
    """Returns a tensor of this shape with the memory of one number."""
    return x.new_empty(1).expand_as(x)


def _is_recomputed() -> bool:
    """Returns whether layers run forward within a backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def _tile_mlp(mlp: MLP, tiles: Tiles) -> None:
    bias, plain = mlp.linear_fc2.bias, mlp.forward

    def run(hidden_states: Tensor) -> Tensor:
        return plain(hidden_states)[0]

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        # What megatron-core gives beside, masks of padding, is for layers of experts.
        parameters = [p for p in mlp.parameters() if p.requires_grad and p is not bias]
        return _tiled(tiles, run, (hidden_states,), parameters), bias

    mlp.forward = forward  # type: ignore[method-assign]


def _tile_experts(layer: MoELayer, tiles: Tiles) -> None:
    """Lets a layer of experts be computed for a chunk of the tokens that its router has seen.

    megatron-core's `forward` calls these methods in turn; all but the router run in one of them.
    """
    plain: Any = SimpleNamespace(
        preprocess=layer.preprocess,
        dispatch=layer.dispatch,
        experts=layer.routed_experts_compute,
        combine=layer.combine,
        postprocess=layer.postprocess,
        shared=layer.shared_experts_compute,
    )
    exchanged = tiles._replace(is_exchanged=True)
    chosen: list[Tensor] = []

    def run(hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        shared = plain.shared(hidden_states)
        routed = plain.preprocess(hidden_states, probs.flatten(0, 1), routing_map.flatten(0, 1))
        output, _ = plain.experts(*plain.dispatch(*routed))
        out: Tensor = plain.postprocess(plain.combine(output), shared)
        return out

    def preprocess(hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        chosen.append(routing_map)
        return hidden_states, probs

    def experts(hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        rows = hidden_states.shape[:2]
        inputs = hidden_states, probs.unflatten(0, rows), chosen.pop().unflatten(0, rows)
        of_router = set(layer.router.parameters())
        others = [p for p in layer.parameters() if p.requires_grad and p not in of_router]
        return _tiled(exchanged, run, inputs, others), None

    layer.preprocess = preprocess  # type: ignore[method-assign]
    layer.dispatch = lambda *routed: routed  # type: ignore[method-assign]
    layer.routed_experts_compute = experts  # type: ignore[method-assign]
    layer.combine = lambda output: output  # type: ignore[method-assign]
    layer.postprocess = lambda output, _: output  # type: ignore[method-assign]
    layer.shared_experts_compute = lambda _: None  # type: ignore[method-assign]


def _tiled(
    tiles: Tiles,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Tensor:
    """Returns what `run` makes of chunks of the inputs, [s, b, h] of the first's shape. It computes
    with these parameters.
    """
    leaves_out = _is_recomputed() and tiles.is_unread
    out: Tensor = _Tiled.apply(tiles, run, leaves_out, len(inputs), *inputs, *parameters)
    return out


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles,
        run: Callable[..., Tensor],
        leaves_out: bool,
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        inputs = tensors[:num_inputs]
        ctx.tiles, ctx.run, ctx.parameters = tiles, run, tensors[num_inputs:]
        ctx.random_states = random._get_all_rng_states() if tiles.is_random else None
        ctx.save_for_backward(*inputs)
        if leaves_out:
            return _shaped_as(inputs[0])
        out = torch.empty_like(inputs[0])
        for part in tiles.parts(len(out)):
            out[part] = run(*(x[part] for x in inputs))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parameters = ctx.saved_tensors, ctx.parameters
        needed = ctx.needs_input_grad[4 : 4 + len(inputs)]
        of_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needed)]
        sums: list[Tensor | None] = [None] * len(parameters)
        with _random_states(ctx.random_states):
            for part in ctx.tiles.parts(len(gradient)):
                own = [x[part].detach() for x in inputs]
                wanted = [x.requires_grad_() for x, need in zip(own, needed) if need]
                with torch.enable_grad():
                    out = ctx.run(*own)
                found = list(
                    torch.autograd.grad(
                        out, (*wanted, *parameters), gradient[part], allow_unused=True
                    )
                )
                for total in (total for total in of_inputs if total is not None):
                    total[part] = found.pop(0)
                _add(sums, found, parameters)
                del own, wanted, out, found  # before the next chunk's are made
        of_parameters = (
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, parameters)
        )
        return None, None, None, None, *of_inputs, *of_parameters


@contextmanager
def _random_states(states: Any) -> Iterator[None]:
    """Gives random numbers that followed `states` meanwhile; None for those that follow anyway."""
    if states is None:
        yield
        return
    with random._fork_rng():
        random._set_all_rng_states(*states)
        yield


def _add(
    sums: list[Tensor | None], found: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> None:
    """Adds a chunk's gradients of parameters to the sums, at least in float32."""
    for number, (gradient, parameter) in enumerate(zip(found, parameters, strict=True)):
        total = sums[number]
        if gradient is None:
            continue
        # The product has added it to the sum of microbatches itself; what it returns is a dummy.
        if getattr(parameter, "grad_added_to_main_grad", False):
            sums[number] = gradient
        elif total is None:
            sums[number] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            total.add_(gradient)


def _tile_linear(linear: ColumnParallelLinear | RowParallelLinear, num_chunks: int) -> None:
    """Lets a product be computed for a chunk of each rank's tokens at a time.

    Tokens that ranks gather stand rank by rank. 2 ranks of tokens 0 1 2 3 and 4 5 6 7, 2 chunks:
    0 1 4 5 and 2 3 6 7.
    """
    plain, size = linear.forward, linear.tp_group.size()

    def gathered(x: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        outputs = [plain(part, *others, **options) for part in x.tensor_split(num_chunks)]
        by_rank = [out.unflatten(0, (size, -1)) for out, _ in outputs]
        return torch.cat(by_rank, dim=1).flatten(0, 1), outputs[0][1]

    def scattered(x: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        parts = x.unflatten(0, (size, -1)).tensor_split(num_chunks, dim=1)
        outputs = [plain(part.flatten(0, 1), *others, **options) for part in parts]
        return torch.cat([out for out, _ in outputs]), outputs[0][1]

    is_column = isinstance(linear, ColumnParallelLinear)
    linear.forward = gathered if is_column else scattered  # type: ignore[method-assign]


def _tile_embedding(embedding: VocabParallelEmbedding, num_chunks: int) -> None:
    """Lets words be looked up for a chunk of each rank's tokens at a time; see `_tile_linear`."""
    plain, size = embedding.forward, embedding.tp_group.size()

    def forward(ids: Tensor) -> Tensor:
        chunks = ids.unflatten(1, (size, -1)).tensor_split(num_chunks, dim=2)
        parts = [chunk.flatten(1) for chunk in chunks if chunk.numel()]
        out: Tensor = _TiledWords.apply(embedding.weight, embedding, plain, parts)
        return out

    embedding.forward = forward  # type: ignore[method-assign]


class _TiledWords(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        embedding: VocabParallelEmbedding,
        plain: Callable[[Tensor], Tensor],
        parts: Sequence[Tensor],
    ) -> Tensor:
        ctx.embedding, ctx.parts = embedding, parts
        return torch.cat([plain(ids) for ids in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        embedding: VocabParallelEmbedding = ctx.embedding
        weight, first = embedding.weight, embedding.vocab_start_index
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros_like(weight, dtype=dtype)
        lengths = [ids.shape[1] // embedding.tp_group.size() for ids in ctx.parts]
        for ids, own in zip(ctx.parts, gradient.split(lengths), strict=True):
            rows = gather_from_sequence_parallel_region(own, group=embedding.tp_group)
            places = ids.t() - first  # [s, b], as the rows
            is_here = (places >= 0) & (places < len(weight))
            rows = rows.masked_fill_(~is_here.unsqueeze(2), 0).flatten(0, 1).to(dtype)
            total.index_add_(0, places.where(is_here, 0).flatten(), rows)
            del rows
        return total.to(weight.dtype), None, None, None
