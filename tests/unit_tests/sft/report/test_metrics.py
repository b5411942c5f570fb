"""What a step's numbers come to, and its line in the log."""

import math
from dataclasses import replace

import pytest

from megatron.sft.report.metrics import Evaluation, dropped_line, sources_line
from tests.unit_tests.sft.runs import SOURCE, STEP


def test_derived_shares():
    """Without it padding and unfilled room, the two things that packing is judged by, could be
    mixed up.
    """
    assert STEP.fill == 0.75
    assert STEP.padding == 0.0625
    assert (STEP.balance, STEP.moved) == (pytest.approx(1.02), 0.125)
    empty = replace(
        STEP, tokens=0, moved_tokens=0, step_cost=0.0, step_cost_bound=0.0, passes_seconds=0.0
    )
    assert (empty.balance, empty.moved, math.isnan(empty.prediction_error)) == (1.0, 0.0, True)


def test_log_line():
    """Without it a number could vanish from the log, or stand there in another unit."""
    parts = STEP.to_line(200).split(" | ")
    assert parts[:4] == ["step   7/200", "loss 2.3457", "lr 3.00e-04", "grad norm 0.500"]
    assert {"12,000 tokens/s", "0.0312 TFLOP/s per device", "4 microbatches", "fill 75.0%"} < set(
        parts
    )
    assert {"padding 6.2%", "balance 1.0200 of the bound", "data 12.5 ms"} < set(parts)


LAYOUTS = [
    ({"num_ranks": 2}, "balance 1.0200 of the bound | moved 12%"),
    (
        {"num_stages": 4, "step_cost": 19.06, "bubble": 0.1234},
        "balance 0.953 of even packs | bubble 12.3%",
    ),
    ({"num_ranks": 2, "num_stages": 2}, "balance 1.020 of even packs | bubble 2.0% | moved 12%"),
]


@pytest.mark.parametrize(("changes", "words"), LAYOUTS)
def test_log_line_of_a_layout(changes, words):
    """A pipeline's balance below 1 would look like a broken bound if the line did not say what
    of."""
    assert f" | {words} | " in replace(STEP, **changes).to_line(200)


def test_log_line_with_a_prediction():
    """Without it nobody would see that the fitted cost is of another device."""
    step = replace(STEP, predicted_seconds=0.38)
    assert "passes 400.0 ms, predicted 380.0 ms (-5.0%)" in step.to_line(200)
    assert step.prediction_error == pytest.approx(-0.05)


def test_log_line_tells_sources_apart():
    """One source that gets worse is hidden by the others that get better."""
    assert " | a 1.2500 (3 samples, 40 tokens)" in replace(STEP, sources={"a": SOURCE}).to_line(200)
    evaluation = Evaluation(
        iteration=1, split="valid", loss=1.0, num_tokens=9, sources={"a": SOURCE}
    )
    assert evaluation.to_line() == (
        "valid loss 1.0000 after step 1 (9 loss tokens, perplexity 2.718) | "
        "a 1.2500 (3 samples, 40 tokens)"
    )
    compared = replace(evaluation, sources={}, figures={"pairs": 3.0, "rewards/margins": 0.5})
    assert compared.to_line() == (
        "valid loss 1.0000 after step 1 (3 pairs, rewards/margins 0.5000)"
    )


def test_accuracy_perplexity_and_epoch_are_told_where_they_are_known():
    """Users of other trainers look for these three; a NaN in a log line alarms for nothing."""
    known = replace(STEP, loss=math.log(8), token_accuracy=0.25, epoch=1.5)
    assert " | epoch 1.50 | loss 2.0794 | token accuracy 25.0% | " in known.to_line(200)
    assert known.perplexity == pytest.approx(8)
    assert "nan" not in replace(STEP, loss=1.0).to_line(200)
    assert replace(STEP, loss=1e4).perplexity == math.inf


def test_log_line_tells_what_went_wrong():
    """Without it dropped samples and skipped steps would pass unseen."""
    dropped = {"chats": {"bad sample": 2}}
    step = replace(STEP, dropped_samples=2, dropped=dropped, truncated_samples=1, skipped=True)
    line = step.to_line(200)
    assert " | 2 dropped: 2 bad sample of chats | 1 truncated | optimizer step skipped" in line


def source(tokens, **changes):
    return replace(SOURCE, sequences=2, tokens=tokens, **changes)


def test_sources_line():
    """A thousand sources must not make a line of a thousand losses; those of most tokens are
    told."""
    assert sources_line(
        {"few": source(10, loss=math.nan, num_loss_tokens=0), "most": source(2000)}
    ) == ("most 1.2500 (2 samples, 2,000 tokens), few (2 samples, 10 tokens)")
    many = sources_line({f"s{number}": source(number) for number in range(1000)})
    assert many.startswith("s999 1.2500")
    assert many.endswith("s996 1.2500 (2 samples, 996 tokens), 996 more")


def test_dropped_line():
    """Without reason and source nobody knows which file to mend."""
    assert dropped_line(
        {"chats": {"over length": 1200, "bad sample": 1}, "web": {"bad sample": 2}}
    ) == ("1,200 over length of chats, 1 bad sample of chats, 2 bad sample of web")
