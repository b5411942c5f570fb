"""The search for layouts against brute force, and the modelled times that it sorts by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.model.shape import ModelShape
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest
from megatron.packing.scheduling.registry import get_scheduler
from megatron.planner.layout.devices import DEVICES
from megatron.planner.layout.page import Bar, figure, layout_page
from megatron.planner.layout.search import (
    RECOMPUTES,
    Candidate,
    Choice,
    Measures,
    Search,
    enumerated,
    search,
    undominated,
)
from megatron.planner.layout.times import TimeModel, reason
from megatron.planner.plan_options import DEFAULT_MODEL
from megatron.planner.sequences import Sequences

GIB = 2**30
BATCHES = [Sequences(np.array([4000, 200, 900, 1500, 60, 3000, 2500, 700] * 4, np.int64))]
TIMES = TimeModel(
    shape=DEFAULT_MODEL,
    vocab_size=128256,
    device=DEVICES["h100"],
    batches=BATCHES,
    scheduler=get_scheduler("default"),
)
PARTS = cache(TIMES.parts)


def seconds_of(one: Candidate) -> float:
    """The modelled step, scheduled once for all tests."""
    return sum(PARTS(one).values())


CLUSTER = list(
    enumerated(4, num_layers=32, num_experts=None, capacities=lambda tp, cp: [4096 // cp, 8192])
)
# Of three stages and of six, three and six tensor-parallel ranks.
SIX = list(enumerated(6, num_layers=32, num_experts=None, capacities=lambda tp, cp: [8192]))


def bytes_of(one: Candidate) -> int:
    """A memory that falls with recomputation and rises with packs, as the traced one does."""
    states = 6 + (12 / (one.dp * one.cp) if one.shards_optimizer else 12)
    kept = {"none": 300_000, "selective": 250_000, "full": 20_000}[one.recompute]
    return int(8e9 * states / one.tp / one.pp + 32 * kept * one.capacity / one.tp)


MEASURES = Measures(
    TIMES.least_seconds,
    TIMES.bound_seconds,
    seconds_of,
    lambda one: bytes_of(one) // 2,
    bytes_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [20 * GIB, 30 * GIB, 45 * GIB, 80 * GIB, 400 * GIB])
@pytest.mark.parametrize("cluster", [CLUSTER, SIX], ids=["4", "6"])
def test_the_search_finds_what_brute_force_finds(cluster: list[Candidate], memory: int) -> None:
    """A bound that is no bound, or a wrong dominance, would hide the best layout."""
    fitting = [
        (seconds_of(one), RECOMPUTES.index(one.recompute), one.capacity, number)
        for number, one in enumerate(cluster)
        if bytes_of(one) <= memory
    ]
    expected = [cluster[number] for *_, number in sorted(fitting)[:5]]
    found = search(cluster, MEASURES, memory)
    assert [choice.candidate for choice in found.best] == expected
    assert found.num_timed <= len(cluster)
    assert all(choice.num_bytes <= memory for choice in found.best)


def test_what_is_slower_and_no_smaller_is_left_out() -> None:
    one = Candidate()
    sizes = [(1.0, 50), (1.1, 60), (1.2, 40), (1.2, 40), (1.3, 45), (1.4, 39)]
    choices = [Choice(one, seconds, size * GIB) for seconds, size in sizes]
    kept = [(choice.seconds, choice.num_bytes // GIB) for choice in undominated(choices)]
    assert kept == [(1.0, 50), (1.2, 40), (1.4, 39)]


def test_times_are_a_range_until_a_device_is_measured() -> None:
    one = CLUSTER[0]
    assert 1.4 * TIMES.seconds(one) < TIMES.most_seconds(one) < 3.5 * TIMES.seconds(one)
    measured = replace(TIMES, measured=PackCost(linear=1e-6, quadratic=0.0, fixed=0.0))
    assert measured.most_seconds(one) == measured.seconds(one)


def test_a_search_says_how_far_it_is() -> None:
    """Minutes without a line are taken for a hang."""
    seen: list[Search] = []
    found = search(CLUSTER, MEASURES, 45 * GIB, progress=seen.append)
    counts = [(one.num_timed, one.num_measured, one.num_too_large) for one in seen]
    assert counts[0] == (0, 0, 0)
    # 0: its bound was computed.
    assert all(sum(more) - sum(less) in (0, 1, 2) for less, more in pairwise(counts))
    assert found.num_timed >= seen[-1].num_timed > len(found.best)


def test_layouts_are_listed_as_they_are_bounded() -> None:
    """Tens of thousands of bounds take seconds, in which only the listing can show progress."""
    events: list[tuple[str, Candidate]] = []

    def listed() -> Iterator[Candidate]:
        for one in SIX:
            events.append(("listed", one))
            yield one

    def least_seconds(one: Candidate) -> float:
        events.append(("bounded", one))
        return TIMES.least_seconds(one)

    search(listed(), MEASURES._replace(least_seconds=least_seconds), 80 * GIB)
    assert events == [(event, one) for one in SIX for event in ("listed", "bounded")]


def test_refused_layouts_are_left_out_and_few_are_checked() -> None:
    """The trainer's checks of every layout took longer than the search."""
    checked: list[Candidate] = []

    def is_valid(one: Candidate) -> bool:
        checked.append(one)
        return one.tp > 1

    found = search(CLUSTER, MEASURES._replace(is_valid=is_valid), 45 * GIB)
    expected = search([one for one in CLUSTER if one.tp > 1], MEASURES, 45 * GIB)
    assert found.best == expected.best
    assert found.num_refused == sum(one.tp == 1 for one in checked) > 0
    assert len(set(checked)) == len(checked) < len(CLUSTER)


@pytest.mark.slow
def test_bounds_of_bubbles_spare_most_schedules() -> None:
    """Of 18,234 layouts 1,452 were scheduled, which took minutes."""
    layouts = enumerated(32, num_layers=32, num_experts=None, capacities=lambda tp, cp: [8192])
    cluster = [one for one in layouts if BATCHES[0].size % one.dp == 0]
    tight = MEASURES._replace(seconds=TIMES.seconds)
    loose = tight._replace(bound_seconds=TIMES.least_seconds)
    found, of_loose = (search(cluster, measures, 200 * GIB) for measures in (tight, loose))
    assert found.best == of_loose.best
    assert 3 * found.num_timed < of_loose.num_timed


def test_layouts_with_the_same_work_share_its_computation() -> None:
    """Sharding of the optimizer and the ends of stages change nothing in it: at 720 GPUs the
    bounds took most of a minute."""
    calls: list[object] = []

    class Counted(Sequences):
        @property
        def squares(self) -> None:  # asked for once for each cost of a batch
            calls.append(self)

    times = replace(TIMES, batches=[Counted(BATCHES[0].lengths)])
    assert [times.least_seconds(one) for one in SIX] == [TIMES.least_seconds(one) for one in SIX]
    works = {(one.dp, one.tp, one.pp, one.vpp, one.cp, one.recompute, one.capacity) for one in SIX}
    assert len(calls) == len(works) < len(SIX)


def test_a_schedule_serves_both_kinds_of_optimizer() -> None:
    """Half of all schedules would be made for nothing."""
    calls: list[object] = []
    scheduler = get_scheduler("default")

    def counted(request: ScheduleRequest) -> Schedule:
        calls.append(request)
        return scheduler(request)

    times = replace(TIMES, scheduler=counted)
    one = Candidate(dp=4, capacity=8192, shards_optimizer=False)
    other = replace(one, shards_optimizer=True)
    assert times.parts(one)["schedule"] == pytest.approx(times.parts(other)["schedule"])
    assert len(calls) == 1
    assert times.seconds(one) != times.seconds(other)


def test_more_memory_is_never_slower() -> None:
    """A plan for a larger GPU that is slower would be a fault of the search."""
    seconds = []
    for memory in (20, 30, 40, 60, 80, 120, 400):
        best = search(CLUSTER, MEASURES, memory * GIB, 1).best
        seconds.append(best[0].seconds if best else float("inf"))
    assert all(less >= more for less, more in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_bounds_are_bounds() -> None:
    """Else a faster layout would come after a slower one. A tree of many short paths is no long
    sequence: its pairs of tokens are far fewer."""
    lengths = np.array([32768, *[600] * 15], np.int64)
    squares = np.array([64 * 512**2, *[600**2] * 15], np.int64)
    trees = replace(
        TIMES, batches=[Sequences(lengths, SampleSizes(lengths, squares, squares, lengths))]
    )
    compared = replace(TIMES, num_forward_passes=1)
    for times, candidates in (
        (TIMES, CLUSTER + SIX),
        (trees, CLUSTER[::20]),
        (compared, CLUSTER[::40]),
    ):
        for one in candidates:
            if times is trees:
                one = replace(one, capacity=32768 // one.cp)
            parts = PARTS(one) if times is TIMES else times.parts(one)
            least = max(times.least_seconds(one), times.bound_seconds(one))
            assert least <= sum(parts.values()) * (1 + 1e-9)
            assert min(parts.values()) >= -1e-9, (one, parts)


@settings(max_examples=60)
@given(st.sampled_from(CLUSTER), st.sampled_from(CLUSTER))
def test_dominance_agrees_with_bytes(one: Candidate, other: Candidate) -> None:
    """A layout is ruled out only by one that holds less."""
    if one.holds_at_least(other):
        assert bytes_of(one) >= bytes_of(other)


def test_every_layout_of_the_cluster_is_there_once() -> None:
    """One that is missing could be the best."""
    assert len(set(CLUSTER)) == len(CLUSTER)
    assert {one.world_size for one in CLUSTER} == {4}
    sizes = {(one.tp, one.pp, one.cp, one.dp) for one in CLUSTER}
    assert len(sizes) == 10  # ordered factors of 4 into four powers of two
    assert not any(one.counts_loss for one in CLUSTER)  # 34 over 2 stages are 16 and 16 again
    experts = enumerated(4, num_layers=4, num_experts=8, capacities=lambda tp, cp: [1])
    assert {one.ep for one in experts} == {1, 2, 4}


def test_sizes_need_not_be_powers_of_two() -> None:
    """Twelve GPUs had no layout of three stages, and 60 experts none of three ranks. Groups of six
    in machines of eight would lie on two of them."""
    twelve = list(enumerated(12, num_layers=32, num_experts=60, capacities=lambda tp, cp: [1]))
    assert len(set(twelve)) == len(twelve)
    sizes = {(one.tp, one.pp, one.cp, one.dp) for one in twelve}
    assert {pp for _, pp, _, _ in sizes} == {1, 2, 3, 4, 6, 12}
    assert {tp for tp, *_ in sizes} == {1, 2, 4}
    assert len(sizes) == 30  # 18, 9 and 3 ways to share 12, 6 and 3 out to three sizes
    assert {one.ep for one in twelve} == {1, 2, 3, 4, 6, 12}
    assert {one.tp for one in SIX} == {1, 2, 3, 6}
    device = DEVICES["h100"]
    assert device.bandwidth(6, 6) == device.bandwidth(4, 24) > device.bandwidth(6, 24)


@given(st.integers(2, 100), st.integers(2, 16))
def test_layers_that_do_not_divide_are_fewer_at_the_ends(num_layers: int, num_stages: int) -> None:
    """What cannot be shared out alike would have no layout at all."""
    world = enumerated(
        num_stages, num_layers=num_layers, num_experts=None, capacities=lambda tp, cp: [1]
    )
    splits = {one.stage_layers for one in world if one.pp == num_stages}
    for split in splits:
        parts = split.of_parts(num_layers)
        assert sum(parts) == num_layers
        assert max(parts) - min(parts[1:-1], default=max(parts)) <= 1
    if num_layers >= num_stages * num_stages:  # each end has a layer left
        assert splits
    if num_layers % num_stages == 0:
        assert not any(split.has_own_ends for split in splits)


def test_an_output_layer_that_counts_evens_stages_out() -> None:
    """The option would be tried for nothing, or its layers be those of an even split."""
    odd = [
        one
        for one in enumerated(2, num_layers=5, num_experts=None, capacities=lambda tp, cp: [8192])
        if one.pp == 2
    ]
    assert {(one.counts_embedding, one.counts_loss) for one in odd} == {(False, True)}
    assert odd[0].title.startswith("PP2 DP1, loss counted as a layer")
    assert "--account-for-loss-in-pipeline-split" in odd[0].flags(5)
    assert Candidate(pp=2, vpp=2, counts_loss=True).layers_per_chunk(7) == 2
    shape = replace(DEFAULT_MODEL, num_layers=5)  # the output layer is as much as 2.4 layers
    even, counted = (
        replace(TIMES, shape=replace(shape, num_layers=number)).seconds(one) / (number + 2.4)
        for number, one in (
            (6, Candidate(pp=2, capacity=8192)),
            (5, Candidate(pp=2, capacity=8192, counts_loss=True)),
        )
    )
    assert counted < 0.97 * even  # 4.4 of 7.4 layers on the last stage, not 5.4 of 8.4


def test_communication_is_counted() -> None:
    """Over machines it costs more; each kind only where there is one."""
    plain = TIMES.parts(Candidate(dp=4, capacity=8192))
    tensor = TIMES.parts(Candidate(tp=4, capacity=8192))
    assert "tensor parallel" in tensor
    assert "tensor parallel" not in plain
    near = TIMES.parts(Candidate(dp=8, capacity=8192))["gradient reduction"]
    far = TIMES.parts(Candidate(dp=16, capacity=8192))["gradient reduction"]
    assert far > 5 * near
    assert TIMES.seconds(Candidate(dp=4, capacity=8192, recompute="full")) > sum(plain.values())
    assert "arithmetic" in reason(plain)


def test_context_parallel_moves_what_each_layer_exchanges() -> None:
    """One width for all layers would count keys of heads that no layer has."""
    layers: dict[str, Any] = {"num_layers": 6, "hidden_size": 2048, "num_attention_heads": 16}
    heads: dict[str, Any] = {"num_query_groups": 4, "kv_channels": 128}
    shapes = {
        "plain": ModelShape(**layers, **heads),
        # 5 layers with a window, whose heads are as before; in the last 1 group of 512 channels
        "global": ModelShape(
            **layers,
            **heads,
            window_size=(511, 0),
            window_attn_skip_freq=(1, 1, 1, 1, 1, 0),
            global_kv_channels=512,
            global_num_query_groups=1,
        ),
        "latent": ModelShape(
            **layers, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
        ),
        "delta net": ModelShape(
            **layers,
            **heads,
            linear_attention_freq=(1, 1, 1, 1, 1, 0),
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    }

    def channels(name: str, tp: int) -> float:
        times = replace(TIMES, shape=shapes[name])
        candidate = Candidate(tp=tp, cp=2, capacity=4096)
        rate = times.device.bandwidth(2 * tp, 2 * tp)
        # forward and backward, 2 bytes each, and half of it from the other rank
        seconds = times._per_token(candidate)["context parallel"]
        return seconds * rate / 2

    assert channels("plain", 1) == pytest.approx(6 * 2 * 4 * 128)
    assert channels("plain", 2) == pytest.approx(6 * 2 * 2 * 128)
    assert channels("plain", 8) == pytest.approx(6 * 2 * 1 * 128)  # two ranks share a group
    assert channels("global", 1) == pytest.approx(5 * 2 * 4 * 128 + 2 * 512)
    assert channels("global", 4) == pytest.approx(5 * 2 * 1 * 128 + 2 * 512)
    assert channels("latent", 1) == channels("latent", 2) == pytest.approx(6 * 576)
    of_delta_net = 2 * 2048 + 2 * 4096 + 2 * 32
    assert channels("delta net", 2) == pytest.approx(5 * of_delta_net / 4 + 2 * 2 * 128)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_reference_runs_forward_once_more(recompute: Literal["none", "full"]) -> None:
    """A layout's time would be a quarter too short: DPO's reference has each token's forward pass
    again, with the forward messages of all groups, and no gradients.
    """
    one = Candidate(tp=2, cp=2, pp=2, dp=2, capacity=4096, recompute=recompute)
    plain = TIMES.parts(one)
    found = replace(TIMES, num_forward_passes=1).parts(one)
    again = recompute == "full"  # layers, which a step without a reference runs forward twice
    assert found["memory traffic"] / plain["memory traffic"] == pytest.approx(
        (4 + again) / (3 + again)
    )
    assert found["attention"] / plain["attention"] == pytest.approx((4 + again) / (3 + again))
    least, most = (1.25, 4 / 3) if again else (4 / 3, 4 / 3)  # the output layer is never repeated
    assert least - 1e-9 <= found["arithmetic"] / plain["arithmetic"] <= most + 1e-9
    # All-gathers and reduce-scatters: 4 forward, 6 backward, 4 recomputed.
    of_tensor = found["tensor parallel"] / plain["tensor parallel"]
    assert of_tensor == pytest.approx((14 + 4 * again) / (10 + 4 * again))
    assert found["pipeline parallel"] / plain["pipeline parallel"] == pytest.approx(3 / 2)
    for name in ("gradient reduction", "optimizer"):
        assert found[name] == plain[name]
    measured = replace(TIMES, measured=PackCost(1e-5, 1e-10, 1e-3))
    times = [replace(measured, num_forward_passes=count).parts(one) for count in (0, 2)]
    assert times[1]["arithmetic"] / times[0]["arithmetic"] == pytest.approx(
        (5 + again) / (3 + again)
    )
    copied = replace(TIMES, num_forward_passes=1).least_states(one) - TIMES.least_states(one)
    assert copied == pytest.approx(TIMES.least_states(replace(one, dp=1 << 20)) / 3, rel=0.01)


def test_windows_make_attention_cheaper() -> None:
    """Layers with a window look at their part of a sequence; a window that holds all, at all."""
    one = Candidate(dp=2, cp=2, capacity=4096)
    whole = TIMES.parts(one)
    layers = DEFAULT_MODEL.num_layers
    assert layers is not None
    for tokens, least, most in ((4000, 0.999, 1.001), (128, 0.5, 0.6)):
        shape = replace(
            DEFAULT_MODEL,
            window_size=(tokens - 1, 0),
            window_attn_skip_freq=(1, 0) * (layers // 2),
        )
        parts = replace(TIMES, shape=shape).parts(one)
        assert least < parts["attention"] / whole["attention"] < most
        assert parts["arithmetic"] == whole["arithmetic"]
        assert sum(parts.values()) <= 1.001 * sum(whole.values())


def test_flags_and_page() -> None:
    """They are to be pasted; the page must be whole without other files."""
    one = Candidate(dp=2, tp=2, pp=4, vpp=2, cp=2, recompute="full", capacity=4096)
    assert one.flags(32) == (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 4 --context-parallel-size 2 "
        "--recompute-granularity full --sequence-packing --max-seqlen-per-dp-cp-rank 4096 "
        "--use-distributed-optimizer"
    )
    bar = Bar(one.title, {"arithmetic": 2.0}, [("stage 0", {"weights": GIB, "<b>": GIB})])
    page = layout_page([bar], 80 * GIB, 1000.0)
    assert page.count("<rect") == 3
    assert "&lt;b&gt;" in page
    assert "stage 0 2 GiB" in page
    assert [figure(size) for size in (0.0012345, 12.345, 12345.6)] == ["0.00123", "12.3", "12,346"]


def test_a_part_has_one_colour() -> None:
    """The last stage has no embedding: its MLP had the colour of the first one's embedding."""
    stages = [("first", {"embedding": GIB, "MLP": GIB}), ("last", {"MLP": GIB})]
    page = layout_page([Bar("x", {"arithmetic": 2.0}, stages)], 80 * GIB, 1000.0)
    (legend,) = re.findall(r'background: (#\w+)"></i>MLP', page)
    assert re.findall(r'fill="(#\w+)"><title>MLP', page) == [legend, legend]
    assert re.findall(r'fill="(#\w+)"><title>embedding', page) != [legend]
