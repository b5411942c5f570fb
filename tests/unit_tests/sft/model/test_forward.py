"""The loss as sum and count, and the padded baseline, in literal numbers."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def forward():
    from megatron.sft.model import forward

    return forward


@pytest.fixture
def padded(forward, monkeypatch):
    """Return padded_batches as context-parallel rank `rank` of `size` sees it."""

    def make(draws, num_rows, multiple=1, size=1, rank=0):
        monkeypatch.setattr(forward.parallel_state, "get_context_parallel_world_size", lambda: size)
        monkeypatch.setattr(forward.parallel_state, "get_context_parallel_rank", lambda: rank)
        return list(forward.padded_batches(iter(draws), num_rows, multiple))

    return make


def sample(tokens, mask, source=0):
    tokens = np.array(tokens)
    fields = {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.array(mask, np.float32)}
    return {**fields, "source": source}


def test_loss_sum_literal(forward):
    """Weights in the count, or a mean per microbatch, make the loss depend on how sequences are
    packed.
    """
    mask = torch.tensor([[0.0, 2.0, 0.5, 1.0]])
    total, num_tokens, log = forward.loss_sum(mask, torch.tensor([[8.0, 1.0, 4.0, 3.0]]))
    assert total.item() == 2 * 1 + 0.5 * 4 + 3
    assert num_tokens.item() == 3
    assert num_tokens.dtype == torch.int32
    assert total.shape == num_tokens.shape == ()
    assert [value.item() for value in log["lm loss"]] == [7.0, 3]


def test_loss_by_source_literal(forward):
    """A masked token that counts, or a weight, makes a source look better or worse than the others
    without being it.
    """
    mask = torch.tensor([[0.0, 2.0, 0.5, 1.0]])
    sources = torch.tensor([[0, 2, 0, 2]])
    _, _, log = forward.loss_sum(mask, torch.tensor([[8.0, 1.0, 4.0, 3.0]]), sources, 4)
    assert log["source losses"].tolist() == [[4.0, 0.0, 4.0, 0.0], [1, 0, 2, 0]]
    assert log["source losses"].dtype == torch.float64
    assert "source losses" not in forward.loss_sum(mask, torch.ones(1, 4))[2]


def test_a_token_that_paths_share_counts_for_each_in_its_source(forward):
    """A source of trees would have the loss of its last turns, as prompts are shared."""
    mask, sources = torch.tensor([[0.0, 4.0, 0.5, 1.0]]), torch.tensor([[0, 1, 1, 0]])
    _, num_tokens, log = forward.loss_sum(
        mask,
        torch.tensor([[8.0, 1.0, 4.0, 3.0]]),
        sources,
        2,
        num_paths=torch.tensor([[0, 3, 1, 2]]),
    )
    assert num_tokens.item() == 6
    assert log["source losses"].tolist() == [[6.0, 7.0], [2, 4]]


def test_loss_of_masked_tokens_only_is_zero(forward):
    """Dummy packs are all masked: 0 / 0 there would make every gradient NaN."""
    output = torch.tensor([[5.0, 6.0]], requires_grad=True)
    total, num_tokens, _ = forward.loss_sum(torch.zeros(1, 2), output)
    assert (total.item(), num_tokens.item()) == (0.0, 0)
    total.backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[0.0, 0.0]]


def test_gradient_of_each_token_is_its_weight(forward):
    """A detached or rescaled sum trains with another learning rate, or not at all."""
    output = torch.tensor([[5.0, 6.0, 7.0]], requires_grad=True)
    total, _, log = forward.loss_sum(torch.tensor([[1.0, 0.0, 0.25]]), output)
    total.backward()
    assert output.grad is not None
    assert output.grad.tolist() == [[1.0, 0.0, 0.25]]
    assert not any(value.requires_grad for value in log["lm loss"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sum_is_at_least_float32_and_float64_stays(forward, given, expected):
    """In bfloat16 a sum of 300 ones is 256; float32 would hide what the float64 exactness tests
    look for.
    """
    total, num_tokens, _ = forward.loss_sum(torch.ones(1, 300), torch.ones(1, 300, dtype=given))
    assert (total.dtype, total.item(), num_tokens.item()) == (expected, 300, 300)
    if given == torch.float64:
        tiny = torch.full((1, 3), 1e-12, dtype=given) + 1
        assert forward.loss_sum(torch.ones(1, 3), tiny)[0].item() == pytest.approx(
            3 + 3e-12, abs=1e-15
        )


def test_mask_is_needed_where_the_loss_is(forward):
    """Without a mask on the last stage, the loss would silently be of all tokens."""
    with pytest.raises(AssertionError):
        forward.loss_sum(None, torch.ones(1, 2))


def test_padded_batch_literal(padded):
    """Padding with loss, or positions that go on into it, makes the baseline another model."""
    (batch,) = padded(
        [[sample([5, 6, 7], [0, 1, 0.5]), sample([9], [1], 3)]], num_rows=3, multiple=4
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 0], [9, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 8, 0], [10, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 0.5, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.padding_mask.tolist() == [[False] * 3 + [True], [False] + [True] * 3, [True] * 4]
    assert batch.sources.tolist() == [[0] * 4, [3] * 4, [0] * 4]
    assert batch.packed_seq_params is None
    assert {batch.tokens.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}
    assert batch.loss_mask.dtype == torch.float32


def test_rows_are_padded_to_the_longest_of_their_batch(padded):
    """Padded to the longest that there may be, the baseline would compute several times what other
    trainers do.
    """
    draws = [[sample([1] * 5, [1] * 5), sample([2] * 3, [1] * 3)], [sample([3], [1])]]
    assert [batch.tokens.shape for batch in padded(draws, num_rows=2)] == [(2, 5), (2, 1)]
    assert [batch.tokens.shape for batch in padded(draws, num_rows=2, multiple=4)] == [
        (2, 8),
        (2, 4),
    ]


def test_every_draw_is_a_batch_also_an_empty_one(padded):
    """At the end of finite data a rank's draw may be empty: without a batch for it, the others wait
    for ever.
    """
    batches = padded([[sample([1], [1])], []], num_rows=2, multiple=2)
    assert len(batches) == 2
    assert batches[1].loss_mask.count_nonzero() == 0
    assert batches[1].padding_mask.all()
    assert batches[1].tokens.shape == (2, 2)


def test_rows_share_no_memory_between_fields(padded):
    """Fields cut from one tensor must not overwrite one another, nor the next batch."""
    first, second = padded([[sample([5, 6], [1, 1])], [sample([7, 8], [1, 1])]], num_rows=1)
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([[5, 6]], [[7, 8]])


@pytest.mark.parametrize("size", [2, 4])
def test_zigzag_shards_reassemble(padded, size):
    """A rank with the wrong tokens attends to the future, or to none; the loss falls all the
    same."""
    draw = [[sample(range(1, 15), [1] * 14, 1), sample(range(20, 36), [0.5] * 16, 2)]]
    (whole,) = padded(draw, num_rows=3)
    piece = 16 // (2 * size)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "sources"):
        rebuilt = torch.empty_like(getattr(whole, name))
        for rank in range(size):
            (shard,) = padded(draw, num_rows=3, size=size, rank=rank)
            part = getattr(shard, name)
            assert part.shape == (3, 16 // size)
            last = 2 * size - 1 - rank
            rebuilt[:, rank * piece : (rank + 1) * piece] = part[:, :piece]
            rebuilt[:, last * piece : (last + 1) * piece] = part[:, piece:]
        assert torch.equal(rebuilt, getattr(whole, name))


def test_padded_rows_take_no_trees(padded):
    """A branch would attend to its sibling, and the loss be divided by too few tokens."""
    tokens = np.array([5, 6, 7, 8])
    tree = {**sample(tokens, [0, 0, 1, 1]), "cu_seqlens": [0, 2, 3, 4], "parents": [-1, 0, 0]}
    counts = {**sample(tokens, [0, 0, 1, 1]), "num_paths": [0, 0, 2, 1]}
    for given in (tree, counts):
        with pytest.raises(ValueError, match=r"trees of sequences need --sequence-packing"):
            padded([[given]], num_rows=1)
