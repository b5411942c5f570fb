"""Options of activation memory: what they need, and hosts that are too small."""

from __future__ import annotations

import pytest

from megatron.packing.device import Device
from megatron.packing.flags import FlagError
from megatron.packing.model.activation_options import ActivationOptions
from megatron.sft.model import needs
from tests.unit_tests.sft.command_line import parse

FULL = "--recompute-granularity full"
OFFLOAD = f"{FULL} --fine-grained-activation-offloading"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fine-grained-activation-offloading", "needs --recompute-granularity full"),
        (f"{OFFLOAD} --recompute-method block", "without --recompute-method block"),
        (f"{OFFLOAD} --offload-modules core_attn", "--offload-modules core_attn must be layer_in"),
        ("--mlp-chunks-for-training 0", "must be at least 1"),
        ("--query-groups-per-gather 0", "must be at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: str, message: str) -> None:
    """A run that is expected to need less memory would be out of it after hours of waiting."""
    with pytest.raises(FlagError, match=message):
        parse(arguments)


def test_a_config_without_options_has_the_defaults() -> None:
    """A script's config, which has no such attribute, or one of its own by that name."""
    assert ActivationOptions.of(object()) == ActivationOptions()
    assert not ActivationOptions().keeps_inputs_on_host


def test_a_host_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end a rank in the first step, and say nothing."""
    config = parse(OFFLOAD)
    model, size = config.model, 8
    tokens = model.seq_length * config.training.micro_batch_size
    needed = (model.num_layers - 1) * tokens * model.hidden_size * 4 * size
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
    monkeypatch.setattr(needs, "host_available", lambda: needed)
    needs.check_needs(config, Device("cuda"))
    monkeypatch.setattr(needs, "host_available", lambda: needed - 1)
    with pytest.raises(ValueError, match="GiB of layers on this host, which has"):
        needs.check_needs(config, Device("cuda"))
    of_attention = model.num_layers * tokens * (4 * model.hidden_size + 4 * 8) * size
    config = parse(f"{OFFLOAD} --offload-modules layer_input core_attn_output")
    monkeypatch.setattr(needs, "host_available", lambda: needed + of_attention)
    needs.check_needs(config, Device("cuda"))
    monkeypatch.setattr(needs, "host_available", lambda: needed + of_attention - 1)
    with pytest.raises(ValueError, match="GiB of layers on this host, which has"):
        needs.check_needs(config, Device("cuda"))
    needs.check_needs(parse(FULL), Device("cuda"))
    assert needs.host_available() is not None
