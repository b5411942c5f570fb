"""The plug-in in one process: what it changes in megatron-core, takes back and passes through."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.datasets import data_schedule as home
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.moe import router

from megatron.packing import data_schedule, plugin
from megatron.packing.data_schedule import PackedIterator
from megatron.packing.model import get_batch, pipeline
from megatron.packing.model.loss import head
from megatron.packing.model.loss.auxiliary_losses import TokenCounts
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.fitted_cost import Fit, write_fitted_cost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.step.settings import PackingOptions, PackingSettings, model_of
from tests.unit_tests.packing.plugged import (
    Model,
    forward_step,
    make_config,
    parse,
    state_of_megatron_core,
)
from tests.unit_tests.packing.stubs import Ranks

pytestmark = pytest.mark.usefixtures("taken_back")

NAMES = ("wrap_dataloader", "wrap_data_iterator", "wrap_iterator_helper")


def test_add_arguments() -> None:
    """Without the defaults a script that passes none of the options would not train as before."""
    none = parse("")
    assert (none.sequence_packing, none.sequence_packing_scheduler) == (False, None)
    assert (none.max_seqlen_per_dp_cp_rank, none.over_length_policy) == (None, "error")
    some = parse(
        "--sequence-packing --sequence-packing-scheduler empty --max-seqlen-per-dp-cp-rank 8"
    )
    assert (
        some.sequence_packing,
        some.sequence_packing_scheduler,
        some.max_seqlen_per_dp_cp_rank,
    ) == (
        True,
        "empty",
        8,
    )


def test_add_arguments_to_a_parser_that_has_some() -> None:
    """argparse ends the script at its start where an option comes twice, as it would in newer
    Megatron-LM.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, default=17)
    parser.add_argument("--sequence-packing-scheduler", choices=["dp_balanced"])
    plugin.add_arguments(parser)
    arguments = parse("--sequence-packing", parser)
    assert arguments.max_seqlen_per_dp_cp_rank == 17
    assert arguments.sequence_packing
    with pytest.raises(SystemExit):
        parse("--sequence-packing-scheduler default", parser)


def test_install_writes_what_the_arguments_say() -> None:
    """An option that does not reach the config is ignored without a word."""
    config = make_config()
    plugin.install(
        config, parse("--sequence-packing --max-seqlen-per-dp-cp-rank 32 --over-length-policy drop")
    )
    assert config.sequence_packing_scheduler == "default"
    assert config.max_seqlen_per_dp_cp_rank == 32
    assert config.sequence_packing_options == PackingOptions(over_length_policy="drop")
    other = make_config()
    plugin.install(other)
    assert (other.sequence_packing_scheduler, other.max_seqlen_per_dp_cp_rank) == ("default", 64)


def test_install_takes_the_measured_cost(tmp_path: Path) -> None:
    """Packs would go on being balanced by FLOPs, or by the cost of another model or layout."""
    config = make_config(tensor_model_parallel_size=2)
    path = tmp_path / "cost.json"
    fit = Fit(PackCost(linear=2e-5, quadratic=4e-9, fixed=6e-3), 0.0, 0.0)
    write_fitted_cost(path, fit, [], {**model_of(config), "vocab_size": 384}, {})
    plugin.install(config, parse(f"--sequence-packing --pack-cost {path}"))
    assert config.sequence_packing_options.cost == PackCost(linear=1e-5, quadratic=2e-9, fixed=3e-3)
    with pytest.raises(
        ValueError,
        match=r"cost\.json was measured for another model: num_layers is 2 there, but 3 here",
    ):
        plugin.install(make_config(num_layers=3), parse(f"--sequence-packing --pack-cost {path}"))
    with pytest.raises(ValueError, match="--pack-cost needs --sequence-packing"):
        plugin.install(make_config(), parse(f"--pack-cost {path}"))


def test_outliers_wait_in_the_configs_queue_but_not_in_evaluation(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that is not used saves nothing; one that evaluation uses mixes held-out samples into
    training.
    """
    config = make_config()
    plugin.install(config, parse("--sequence-packing --outlier-delay-steps 3"))
    queue = config.sequence_packing_options.delay_queue
    plugin.install(config, parse("--sequence-packing --outlier-delay-steps 3"))
    assert config.sequence_packing_options.delay_queue is queue
    assert queue.max_steps == 3
    plugin.install(config, parse("--sequence-packing"))  # the config's own are kept
    given = SchedulerOptions(outlier_delay_steps=3)
    assert config.sequence_packing_options.scheduling == given
    one: Any = SimpleNamespace(tp=Ranks(), cp=Ranks(), pp=Ranks(), dp=Ranks())
    assert PackingSettings.of(config, one).options == given
    stats = SimpleNamespace(microbatches=1, tokens=0, square_sum=0)
    used = []

    def schedule_global_batch(*arguments: Any, queue: Any = None, step: int = 0) -> Any:
        used.append((queue, step))
        return SimpleNamespace(iterators=lambda num_virtual_stages, device: iter([]), stats=stats)

    monkeypatch.setattr(pipeline, "schedule_global_batch", schedule_global_batch)
    monkeypatch.setattr(pipeline, "device_of", lambda group: torch.device("cpu"))
    groups = SimpleNamespace(**dict.fromkeys(data_schedule.GROUPS, "group"))
    run = get_forward_backward_func()
    model = Model(config)
    for forward_only in (True, False, False, True, True):
        run(
            data_iterator=iter([]),
            model=model,
            forward_step_func=forward_step,
            num_microbatches=1,
            forward_only=forward_only,
            pg_collection=groups,
        )
    # An evaluation is of the step behind which it is, however many batches it has.
    assert used == [(None, 0), (queue, 0), (queue, 1), (None, 2), (None, 2)]
    assert [call["forward_only"] for call in calls] == [True, False, False, True, True]
    plain = make_config()
    plugin.install(plain, parse("--sequence-packing"))
    assert plain.sequence_packing_options.delay_queue is None
    with pytest.raises(
        ValueError, match="--outlier-delay-steps needs a scheduler that mixes what was loaded"
    ):
        plugin.install(config, parse("--sequence-packing --sequence-packing-scheduler empty"))


def test_install_without_packing_leaves_the_config_alone() -> None:
    """The same script must go on training unpacked where nobody asks for packing."""
    config = make_config(calculate_per_token_loss=False)
    before = dict(vars(config))
    plugin.install(config, parse("--max-seqlen-per-dp-cp-rank 32"))
    assert vars(config) == before


def test_uninstall_leaves_megatron_core_as_it_was() -> None:
    """One attribute left behind packs the next model of the process, or hides a later
    megatron-core's own.
    """
    plugin.uninstall()
    before = state_of_megatron_core()
    plugin.install(make_config())
    during = state_of_megatron_core()
    assert all(during["schedules"][name] != before["schedules"][name] for name in plugin.SCHEDULES)
    assert during["data_schedule"].keys() - before["data_schedule"].keys() >= set(NAMES)
    plugin.uninstall()
    assert state_of_megatron_core() == before
    plugin.uninstall()
    assert state_of_megatron_core() == before


def test_installing_again_changes_nothing() -> None:
    """Packed twice over, each step would draw a batch, pack it, and pack the packs."""
    plugin.install(make_config())
    before = state_of_megatron_core()
    with plugin.install(make_config()):
        assert state_of_megatron_core() == before
    assert state_of_megatron_core() == before


def test_with_takes_back() -> None:
    """A `with` that does not end packs what comes after it."""
    before = {name: getattr(schedules, name) for name in plugin.SCHEDULES}
    with plugin.install(make_config()):
        assert isinstance(schedules.forward_backward_no_pipelining, plugin.PackingSchedule)
    assert {name: getattr(schedules, name) for name in plugin.SCHEDULES} == before


def test_uninstall_refuses_to_drop_somebody_elses_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting the original back would silently undo what another extension did on top."""
    with monkeypatch.context() as patch, plugin.install(make_config()):
        patch.setattr(schedules, "forward_backward_no_pipelining", lambda **arguments: [])
        with pytest.raises(
            RuntimeError, match="forward_backward_no_pipelining was replaced after install"
        ):
            plugin.uninstall()
        patch.undo()


def test_names_are_where_megatron_lm_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is there already is megatron-core's own and means something else to its
    callers."""
    own = object()
    monkeypatch.setattr(home, "wrap_data_iterator", own, raising=False)
    plugin.install(make_config())
    assert home.wrap_dataloader is data_schedule.wrap_dataloader
    assert home.wrap_iterator_helper is data_schedule.wrap_iterator_helper
    name = "get_batch_on_this_rank_for_sequence_packing"
    assert getattr(home, name) is getattr(get_batch, name)
    assert home.wrap_data_iterator is own
    plugin.uninstall()
    assert home.wrap_data_iterator is own
    assert not hasattr(home, "wrap_dataloader")


def test_models_without_packing_pass_through(calls: list[dict[str, Any]]) -> None:
    """A reward or reference model beside the packed one would be fed packs that it never asked
    for."""
    plugin.install(make_config())
    model, data = Model(make_config()), iter([1])
    given = {
        "data_iterator": data,
        "model": model,
        "forward_step_func": forward_step,
        "num_microbatches": 3,
    }
    assert get_forward_backward_func()(**given, forward_only=True) == [(1.0, 2, {"lm loss": 3.0})]
    assert calls == [{**given, "forward_only": True}]
    assert calls[0]["data_iterator"] is data
    assert calls[0]["forward_step_func"] is forward_step


def test_empty_packs_are_balanced_while_a_step_runs(calls: list[dict[str, Any]]) -> None:
    """An empty pack would make every gradient of a model of experts NaN; another model's router is
    not ours.
    """
    name, found = "get_tokens_per_expert_and_token_count", []
    plain = getattr(router, name)

    def forward_step_of_experts(data_iterator: Any, model: Any) -> Any:
        found.append(isinstance(getattr(router, name), TokenCounts))
        return forward_step(data_iterator, model)

    config = make_config()
    plugin.install(config)
    get_forward_backward_func()(
        data_iterator=PackedIterator([]),
        model=Model(config),
        forward_step_func=forward_step_of_experts,
        num_microbatches=1,
    )
    assert found == [True]
    assert getattr(router, name) is plain


def test_an_iterator_that_the_script_wrapped_is_not_packed_again(
    calls: list[dict[str, Any]],
) -> None:
    """Packs would be packed as if they were sequences, with their padding as tokens."""
    config = make_config()
    plugin.install(config)
    packs = PackedIterator([{"tokens": torch.arange(4), "cu_seqlens": torch.tensor([0, 3])}])
    for data in (packs, [packs, packs]):
        get_forward_backward_func()(
            data_iterator=data,
            model=Model(config),
            forward_step_func=forward_step,
            num_microbatches=1,
        )
        assert calls[-1]["data_iterator"] is data
    assert len(list(packs)) == 1, "looking at the iterator must not consume it"


def test_refuses_a_scheduler_without_packing() -> None:
    """Who names a scheduler expects packing, and would measure the padded run."""
    with pytest.raises(ValueError, match="--sequence-packing-scheduler needs --sequence-packing"):
        plugin.install(make_config(), parse("--sequence-packing-scheduler default"))


def test_a_hook_on_the_output_layer_keeps_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that scales or caps logits so would train without, where masked tokens have none."""
    skipped: list[object] = []
    monkeypatch.setattr(head, "skip_masked_tokens", skipped.append)
    gpts = []
    for has_hook in (False, True):
        gpt = GPTModel.__new__(GPTModel)
        torch.nn.Module.__init__(gpt)
        gpt.config, gpt.post_process = make_config(), True
        plugin.install(gpt.config)
        gpt.output_layer = torch.nn.Identity()
        if has_hook:
            gpt.output_layer.register_forward_hook(lambda layer, inputs, output: output)
        gpts.append(gpt)
        plugin._leave_out_masked_tokens(gpt)
    assert skipped == gpts[:1]
