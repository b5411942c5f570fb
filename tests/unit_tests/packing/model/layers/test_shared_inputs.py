"""Gradients that tensor-parallel ranks sum, also where they are views."""

import torch

from megatron.packing.model.layers.shared_inputs import shared_by_ranks


class Group:
    """Stands for a group of two ranks that have the same gradient."""

    def size(self):
        return 2


def test_a_gradient_that_is_a_view_is_summed(monkeypatch):
    """megatron-core 0.16 sums a copy of it: each rank would train by its own heads alone."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))
    x = torch.zeros(2, 3, requires_grad=True)
    shared_by_ranks(x, Group()).backward(torch.arange(6.0).view(3, 2).t())
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 4, 8], [2, 6, 10]]
