"""mcore. Inputs of recomputed layers on the host, between forward and backward pass; and outputs of
their attention, which is then not computed again.

    forward     input of layer 0 -> host, of layer 1 -> host, ..., of the last one stays
    backward    layer 2's is used, layer 1's is on its way back, layer 0's is on the host

With full recomputation the input of each layer is what is kept of it. It is copied to pinned memory
beside the computation, and back one layer ahead of its use, by streams of their own. What autograd
saves is replaced by hooks around the forward pass of the decoder; megatron-core is left as it is.

Outputs of attention, with the log of their sums, travel with the input of their layer. In its
recomputation they take the place of what the kernel would compute, and nothing is gathered for it.

Price: two copies of hidden size x tokens of the rank for each layer, against the computation of the
layer for as many tokens. Whether they are hidden behind it has not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random
from torch import Tensor

from megatron.packing.device import host_memory
from megatron.packing.model.activation_options import ActivationOptions
from megatron.packing.model.attention.core_attention import PackedDotProductAttention


def keep_inputs_on_host(gpt: GPTModel) -> HostBytes | None:
    """Lets the decoder of `gpt` keep inputs of its layers on the host, if the `ActivationOptions`
    of its config say so; returns the ledger, None without.
    """
    options = ActivationOptions.of(gpt.config)
    if not options.keeps_inputs_on_host:
        return None
    ledger, decoder = HostBytes(), gpt.decoder
    plain, per_run = decoder.forward, gpt.config.recompute_num_layers
    streams = _Streams()
    outputs = _Outputs(ledger, streams) if options.keeps_attention_on_host else None
    for module in decoder.modules():
        if isinstance(module, PackedDotProductAttention):
            module.kept_outputs = outputs

    def forward(*arguments: Any, **named: Any) -> Any:
        runs = -(-len(decoder.layers) // per_run)
        one = _Pass(max(runs - 1, 0), gpt.config.hidden_size, ledger, streams, outputs)
        if outputs is not None:  # an evaluation saves nothing, and recomputes nothing
            outputs.is_open = torch.is_grad_enabled() and decoder.training
        try:
            with torch.autograd.graph.saved_tensors_hooks(one.pack, _unpack):
                return plain(*arguments, **named)
        finally:
            if outputs is not None:
                outputs.is_open = False

    decoder.forward = forward  # type: ignore[method-assign]
    return ledger


class HostBytes:
    """Bytes of inputs that are on the host."""

    current = 0
    peak = 0

    def add(self, num_bytes: int) -> None:
        """Counts a tensor that goes there, or leaves."""
        self.current += num_bytes
        self.peak = max(self.peak, self.current)


class _Streams:
    """Streams of copies, made when the first tensor of a GPU comes."""

    _made: tuple[Any, Any] | None = None

    def of(self, x: Tensor) -> tuple[Any, Any] | None:
        """Returns those to the host and back; None for tensors of the CPU."""
        if x.is_cuda and self._made is None:
            self._made = torch.cuda.Stream(x.device), torch.cuda.Stream(x.device)
        return self._made if x.is_cuda else None


class _Outputs:
    """Outputs of attention, in the order in which layers are computed."""

    is_open = False

    def __init__(self, ledger: HostBytes, streams: _Streams) -> None:
        self._ledger, self._streams = ledger, streams
        self.pending: list[_Away] = []
        """Those of layers whose input has not been saved yet: it is saved behind them."""
        self.recomputed: list[_Away] = []
        """Those of the layers that are being recomputed."""

    def put(self, *tensors: Tensor) -> None:
        """See `KeptOutputs`."""
        for x in tensors:
            self.pending.append(_Away(x, None, self._ledger, self._streams.of(x)))

    def take(self) -> tuple[Tensor, Tensor]:
        """See `KeptOutputs`."""
        output, log_sum, *self.recomputed = self.recomputed
        return output.take(), log_sum.take()


class _Pass:
    """One forward pass of the decoder."""

    def __init__(
        self,
        count: int,
        width: int,
        ledger: HostBytes,
        streams: _Streams,
        outputs: _Outputs | None,
    ) -> None:
        """count: inputs that leave. width: of hidden states, by which they are told from rotary
        tables, which layers share.
        """
        self._left, self._width, self._ledger, self._streams = count, width, ledger, streams
        self._outputs = outputs
        self._last: _Away | None = None

    def pack(self, x: Tensor) -> Any:
        """Returns what autograd keeps in place of `x`, without a reference to it where it leaves:
        hooks live as long as what they have saved.
        """
        # megatron-core adds to the residual stream with gradients enabled, also in a forward pass
        # of which nothing is kept: what a norm there saves is dropped with it.
        if random.is_checkpointing() or x.dim() != 3 or x.shape[-1] != self._width:
            return x
        if not self._left:
            kept: Any = _Stays(x, self._last)
        else:
            self._left -= 1
            kept = self._last = _Away(x, self._last, self._ledger, self._streams.of(x))
        if self._outputs is not None:
            kept.beside, self._outputs.pending = self._outputs.pending, []
            kept.outputs = self._outputs
        return kept


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.outputs is not None:
        kept.outputs.recomputed, kept.beside = kept.beside, []
    x: Tensor = kept.take()
    return x


class _Stays:
    """A tensor on the device, behind others that are away."""

    outputs: _Outputs | None = None
    beside: Sequence[_Away] = ()

    def __init__(self, x: Tensor, before: _Away | None) -> None:
        self._x, self._before = x, before

    def take(self) -> Tensor:
        """Returns it; the one before it begins to come back."""
        if self._before is not None:
            self._before.fetch()
        return self._x


class _Away:
    """A tensor on the host."""

    outputs: _Outputs | None = None
    beside: Sequence[_Away] = ()
    """Outputs of attention of the layers that it is the input of."""

    def __init__(
        self, x: Tensor, before: _Away | None, ledger: HostBytes, streams: tuple[Any, Any] | None
    ) -> None:
        self._before, self._ledger, self._streams = before, ledger, streams
        self._device = x.device
        self._back: Tensor | None = None
        self._num_bytes = x.nbytes
        with torch.no_grad(), host_memory():
            self._host: Tensor | None = torch.empty(
                x.shape, dtype=x.dtype, device="cpu", pin_memory=streams is not None
            )
            ledger.add(self._num_bytes)
            if streams is None:
                self._host.copy_(x)
                return
            out, _ = streams
            out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(out):
                self._host.copy_(x, non_blocking=True)
            # Its memory is not given to others before the copy is over.
            x.record_stream(out)

    def fetch(self) -> None:
        """Begins to copy it back, and what is beside it, and leaves the host."""
        for one in self.beside:
            one.fetch()
        if self._host is None:
            return
        if self._streams is None:
            self._back = torch.empty_like(self._host, device=self._device)
            self._back.copy_(self._host)
        else:
            out, back = self._streams
            back.wait_stream(out)
            with torch.cuda.stream(back):
                self._back = torch.empty_like(self._host, device=self._device)
                self._back.copy_(self._host, non_blocking=True)
        self._leave()

    def take(self) -> Tensor:
        """Returns it on the device; the one before it begins to come back."""
        self.fetch()
        x = self._back
        assert x is not None, "autograd unpacks what it has saved once"
        self._back = None
        if self._streams is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._streams[1])
            x.record_stream(current)
        if self._before is not None:
            self._before.fetch()
            self._before = None
        return x

    def _leave(self) -> None:
        if self._host is not None:
            self._host = None
            self._ledger.add(-self._num_bytes)

    def __del__(self) -> None:
        self._leave()  # where a pass has no backward pass
