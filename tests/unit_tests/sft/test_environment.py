"""What a start of the trainer does before megatron-core is imported."""

import torch

from megatron.sft.environment import compiling_when_called


def test_compiling_waits_for_the_first_call(monkeypatch):
    """Importing torch's compiler is a quarter of what a start takes, for functions that most runs never call."""
    compiled = []

    def compile_now(function, **options):
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiling_when_called():

        @torch.compile(dynamic=True)
        def twice(x):
            return 2 * x

        @torch.compile
        def thrice(x):
            return 3 * x

    assert torch.compile is compile_now
    assert not compiled
    assert [twice(2), twice(x=3), thrice(2)] == [4, 6, 6]
    assert compiled == [("twice", {"dynamic": True}), ("thrice", {})]
    assert twice.__name__ == "twice"
