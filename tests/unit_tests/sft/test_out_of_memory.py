"""Where memory was missing, by the functions on the stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def raised_in(names: list[str]) -> BaseException:
    """Returns what is raised below functions of these names, outermost first."""

    def inner() -> None:
        raise MemoryError

    call: Callable[[], None] = inner
    for name in reversed(names):
        scope: dict[str, object] = {"call": call}
        exec(f"def {name}(): call()", scope)
        call = scope[name]  # type: ignore[assignment]
    with pytest.raises(MemoryError) as failure:
        call()
    return failure.value


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        (["_step", "forward_backward"], "the passes"),
        (["_step", "update_weights"], "the optimizer step"),
        (["_evaluate", "forward_backward"], "the evaluation"),
        (["_evaluate_if_due", "answers"], "the evaluation"),
        (["_evaluate_if_due", "_save"], "a checkpoint"),
        (["build_training"], "building the model"),
        (["train"], "training"),
    ],
)
def test_the_phase_is_that_of_the_stack(names: list[str], phase: str) -> None:
    """Answers to prompts were called training, and their way out is another."""
    from megatron.sft.out_of_memory import place_of

    assert place_of(raised_in(names)).phase == phase


def test_every_name_is_a_function_of_the_trainer() -> None:
    """A function that is renamed would leave its phase without a word."""
    from megatron.sft.out_of_memory import _PHASES
    from megatron.sft.training import train
    from megatron.sft.training.passes import Passes
    from megatron.sft.training.update import Updater

    for name in _PHASES:
        assert any(hasattr(owner, name) for owner in (train, train.Trainer, Passes, Updater)), name
