"""Numbers of tokens that experts get."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.sft.fit.fake.host_reads import Experts, HostReads, dispatch, spread_evenly


def test_balanced_and_worst_case_of_eight_experts() -> None:
    """Balanced: two of eight experts for each of 64 tokens on each of four ranks."""
    experts = Experts(num_experts=8, num_here=2, topk=2, num_ranks=4, rank=1)
    balanced = dispatch(64, experts, "balanced")
    assert balanced.tokens_per_expert.tolist() == [64, 64]
    assert balanced.input_splits.tolist() == [32, 32, 32, 32]
    assert balanced.output_splits.tolist() == [32, 32, 32, 32]
    assert balanced.from_ranks.tolist() == [[16, 16]] * 4
    worst = dispatch(64, experts, "worst")  # all tokens go to both experts here
    assert worst.tokens_per_expert.tolist() == [256, 256]
    assert worst.input_splits.tolist() == [0, 128, 0, 0]
    assert worst.output_splits.tolist() == [128, 128, 128, 128]


@given(
    num_tokens=st.integers(1, 500),
    num_ranks=st.integers(1, 4),
    num_here=st.integers(1, 4),
    topk=st.integers(1, 4),
    data=st.data(),
)
def test_no_token_is_lost(
    num_tokens: int, num_ranks: int, num_here: int, topk: int, data: st.DataObject
) -> None:
    """Splits that do not sum to the tokens would be an all-to-all that no run makes."""
    num_experts = num_here * num_ranks
    topk = min(topk, num_experts)
    rank = data.draw(st.integers(0, num_ranks - 1))
    experts = Experts(num_experts, num_here, topk, num_ranks, rank)
    balanced, worst = (dispatch(num_tokens, experts, kind) for kind in ("balanced", "worst"))
    for numbers in (balanced, worst):
        assert numbers.input_splits.sum() == num_tokens * topk
        assert numbers.output_splits.sum() == numbers.tokens_per_expert.sum()
        assert numbers.from_ranks.sum(0).tolist() == numbers.tokens_per_expert.tolist()
        assert numbers.from_ranks.max() <= num_tokens or num_experts < topk
    assert worst.tokens_per_expert.sum() >= balanced.tokens_per_expert.sum()


def test_recorded_numbers_come_in_order() -> None:
    """They are those of layers; in another order every layer would have another's."""
    experts = Experts(4, 2, 1, 2, 0)
    recorded = [dispatch(size, experts, "balanced") for size in (8, 16)]
    reads = HostReads(recorded=recorded)
    assert [reads.dispatch(1, experts) for _ in recorded] == recorded
    assert spread_evenly(7, 3).tolist() == [3, 2, 2]
