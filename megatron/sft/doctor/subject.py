"""mcore. A run of this trainer as a subject: its own model, passes, data path and optimizer.

with process_groups(small) as device:
    diagnosis = examine(subject_of_run(small, device))
"""

from __future__ import annotations

from typing import Any

from megatron.packing.device import Device
from megatron.packing.doctor.subject import Subject
from megatron.packing.doctor.subjects.plugin_subject import PluginScript, subject_from_plugin
from megatron.sft.data.counts import Counts
from megatron.sft.doctor.shrink import declared_windows
from megatron.sft.model.build import build_training
from megatron.sft.model.forward import forward_step
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.step_account import Reduction


def subject_of_run(config: SFTConfig, device: Device, name: str = "this run") -> Subject:
    """Builds the model of a small run, with random weights; collective.

    Args:
        config: of `shrink.small_run`.
        device: of this rank; process groups are made.
        name: of the subject, for the report.
    """
    vocab_size = config.data.vocab_size
    assert vocab_size is not None
    training = build_training(config, vocab_size, device)

    def report_loss(losses: list[Any]) -> float:
        counts = Counts.none(1)
        return Reduction(losses, False, counts, device).result().loss

    return subject_from_plugin(
        PluginScript(
            name=name,
            model=training.model,
            vocab_size=vocab_size,
            forward_step=forward_step,
            optimizer=training.optimizer,
            report_loss=report_loss,
            takes_weights=True,
            windows=declared_windows(config.model),
        )
    )
