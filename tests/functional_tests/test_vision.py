"""Chats with images beside transformers, each alone: logits, losses and gradients of tower,
projector and language model.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from examples.benchmarks.hf_training import largest
from examples.tiny_images.ask import MAX_TOKENS, answers
from examples.tiny_images.make_data import chat, drawn
from examples.tiny_images.make_data import write_model as write_tiny_model
from megatron.sft.commands.chat import ChatOptions, open_speaker
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.hf_models import (
    largest_apart,
    logits_of,
    read_folder,
    train_by_transformers,
    write_peft,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import assert_equal
from tests.functional_tests.vision import MISTAKES, chats, train_images, write_vision_model

BATCHES: list[Any] = [chats(5)]
TRAINED = "--images --tower-lr 1e-3 --projector-lr 1e-3"
_TP = "--tensor-model-parallel-size 2"
_SP, _PP, _CP = (
    f"{_TP} --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
_RECOMPUTED = "--recompute-granularity full"
_LONG = f"{_RECOMPUTED} --mlp-chunks-for-training 4 --fine-grained-activation-offloading"
ALL_LAYOUTS = {
    "alone": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, _TP),
    "tp2-sp": (2, _SP),
    "pp2": (2, _PP),
    "cp2": (2, _CP),
    "recomputed": (1, _RECOMPUTED),
    "tp2-sp-recomputed": (2, f"{_SP} {_RECOMPUTED}"),
    "pp2-recomputed": (2, f"{_PP} {_RECOMPUTED}"),
    "cp2-recomputed": (2, f"{_CP} {_RECOMPUTED}"),
    "tp2-sp-long": (
        2,
        f"{_SP} {_LONG} --attention-chunks-for-training 4 --offload-modules layer_input "
        "core_attn_output",
    ),
    "cp2-long": (2, f"{_CP} {_LONG} --query-groups-per-gather 1"),
    "dp2-pp2": (4, _PP),
    "dp2-cp2": (4, _CP),
    "dp2-tp2-sp": (4, _SP),
    "tp2-sp-pp2": (4, f"{_SP} {_PP}"),
    "tp2-sp-cp2": (4, f"{_SP} {_CP}"),
    "pp2-cp2": (4, f"{_PP} {_CP}"),
}
ALL = os.environ.get("LAYOUTS") == "all"
DENSE = ("qwen3-vl", "qwen3.5", "qwen2.5-vl")
_EXPERTS = "--moe-router-dtype fp64"
CASES = [("qwen3-vl", "tp2-sp-recomputed")]
if ALL:
    CASES = [(name, layout) for name in DENSE for layout in ALL_LAYOUTS]
    ALL_LAYOUTS |= {
        "moe": (1, _EXPERTS),
        "ep2": (2, f"--expert-model-parallel-size 2 {_EXPERTS}"),
        "tp2-sp-ep2": (2, f"{_SP} --expert-model-parallel-size 2 {_EXPERTS}"),
    }
    CASES += [
        (name, layout)
        for name in ("qwen3-vl-moe", "qwen3.5-moe")
        for layout in ("moe", "ep2", "tp2-sp-ep2")
    ]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_it_computes_what_transformers_computes(
    tmp_path: Path, record_property: Any, name: str, layout: str
) -> None:
    """Features that are not added, positions that run on through a pack, rows of another image:
    each trains on with nearly the same loss.
    """
    folder = tmp_path / "model"
    run_ranks(write_vision_model, 1, name, folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    world_size, flags = ALL_LAYOUTS[layout]
    per_rank = run_ranks(
        train_images,
        world_size,
        f"{TRAINED} {flags}",
        folder,
        BATCHES,
        torch.float64,
        tmp_path / "gradients",
        tmp_path / "weights",
    )
    assert per_rank[0][0] == pytest.approx(expected.losses, rel=1e-12)
    found = []
    if "cp2" not in layout:  # which spreads the logits of a sequence over ranks
        packs = [pack for _, first in per_rank for pack in first]
        found = logits_of(BATCHES[0], packs, expected.logits[0].shape[-1])
        record_property("logits", largest_apart(found, expected.logits))
    for ours, theirs in zip(found, expected.logits):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    gradients = read_folder(tmp_path / "gradients")
    record_property("gradients", largest_apart(gradients, expected.gradients))
    assert_equal(gradients, expected.gradients, 1e-12)
    source = read_folder(folder)
    written = read_folder(tmp_path / "weights")
    assert_equal(written, {key: tensor.double() for key, tensor in source.items()}, 0.0)


@pytest.mark.skipif(not ALL, reason="make vision runs it")
@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name])
def test_mistakes_show(tmp_path: Path, record_property: Any, mistake: str) -> None:
    """The loss hardly moves with some of them, so that gradients must tell."""
    folder = tmp_path / "model"
    run_ranks(write_vision_model, 1, "qwen3-vl", folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    target = tmp_path / "gradients"
    run_ranks(
        partial(train_images, mistake=mistake), 1, TRAINED, folder, BATCHES, torch.float64, target
    )
    apart = largest_apart(read_folder(target), expected.gradients)
    record_property("gradients", apart)
    assert apart > 1e-3


STEPS = {
    "dp2": (2, "--use-distributed-optimizer"),
    "tp2-sp-pp2": ALL_LAYOUTS["tp2-sp-pp2"],
    "cp2": ALL_LAYOUTS["cp2"],
}


@pytest.mark.skipif(not ALL, reason="make vision runs it")
@pytest.mark.parametrize("layout", STEPS)
def test_losses_of_many_steps(tmp_path: Path, record_property: Any, layout: str) -> None:
    """A tower whose gradient is summed twice, or whose group the optimizer forgets, shows from the
    second step on.
    """
    folder, batches = tmp_path / "model", [chats(step) for step in range(20)]
    run_ranks(write_vision_model, 1, "qwen3-vl", folder)
    expected = run_ranks(train_by_transformers, 1, folder, batches, torch.float64)[0].losses
    world_size, flags = STEPS[layout]
    ranks = run_ranks(
        train_images, world_size, f"{TRAINED} {flags}", folder, batches, torch.float64
    )
    for losses, _ in ranks:
        record_property("losses", largest(losses, expected))
        assert largest(losses, expected) <= 1e-10


@pytest.mark.skipif(not ALL, reason="make vision runs it")
@pytest.mark.parametrize(
    "trained",
    [
        *("", "--projector-lr 1e-3", "--tower-lr 1e-3"),
        "--projector-lr 1e-3 --freeze-language-model",
        "--projector-lr 1e-3 --tower-lr 1e-3 --freeze-language-model",
    ],
)
@pytest.mark.parametrize("layout", ["alone", "tp2-sp-cp2", "pp2-recomputed"])
def test_parts_are_frozen(tmp_path: Path, record_property: Any, trained: str, layout: str) -> None:
    """What is trained has the gradients of a model that is trained whole; the rest is copied."""
    folder = tmp_path / "model"
    run_ranks(write_vision_model, 1, "qwen3-vl", folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    world_size, flags = ALL_LAYOUTS[layout]
    target, weights = tmp_path / "gradients", tmp_path / "weights"
    run_ranks(
        train_images,
        world_size,
        f"--images {trained} {flags}",
        folder,
        BATCHES,
        torch.float64,
        target,
        weights,
    )
    projector = (".merger.", ".deepstack_merger_list.")
    wanted = {
        name: gradient
        for name, gradient in expected.gradients.items()
        if (
            "--freeze" not in trained
            if ".visual." not in name
            else "--projector" in trained
            if any(one in name for one in projector)
            else "--tower" in trained
        )
    }
    found = read_folder(target)
    record_property("gradients", largest_apart(found, wanted))
    assert_equal(found, wanted, 1e-12)
    source, written = read_folder(folder), read_folder(weights)
    for name in source.keys() - wanted.keys():  # in the type of the folder, not of the run
        assert torch.equal(source[name], written[name])


_MODULES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
ADAPTED = {
    "qwen3-vl": _MODULES,
    "qwen2.5-vl": _MODULES,  # of which its tower has some, too
    "qwen3.5": [*_MODULES, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"],
}


@pytest.mark.skipif(not ALL, reason="make vision runs it")
@pytest.mark.parametrize("layout", ["alone", "dp2", "tp2-sp-recomputed", "pp2-recomputed", "cp2"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_beside_peft(tmp_path: Path, record_property: Any, name: str, layout: str) -> None:
    """Nothing but adapters has a gradient, so that recomputed layers could have none at all; what
    is written must not give peft adapters of a tower.
    """
    pytest.importorskip("peft")
    folder, source, target, ours = (
        tmp_path / part for part in ("model", "source", "gradients", "ours")
    )
    run_ranks(write_vision_model, 1, name, folder)
    run_ranks(
        write_peft,
        1,
        folder,
        source,
        {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ADAPTED[name],
            "exclude_modules": r"(?!model\.language_model\.).*",
        },
    )
    world_size, flags = ALL_LAYOUTS[layout]
    per_rank = run_ranks(
        train_images,
        world_size,
        f"--images --lora --lora-adapter {source} {flags}",
        folder,
        BATCHES,
        torch.float64,
        target,
        ours,
    )
    theirs = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64, 1e-3, ours)[0]
    record_property("losses", largest(per_rank[0][0], theirs.losses))
    assert per_rank[0][0] == pytest.approx(theirs.losses, rel=1e-12)
    if layout != "cp2":
        packs = [pack for _, first in per_rank for pack in first]
        found = logits_of(BATCHES[0], packs, theirs.logits[0].shape[-1])
        record_property("logits", largest_apart(found, theirs.logits))
        for one, other in zip(found, theirs.logits, strict=True):
            assert (one - other).abs().max() <= 1e-12 * other.abs().max()
    gradients = read_folder(target)
    assert not any(".visual." in one for one in gradients)
    record_property("gradients", largest_apart(gradients, theirs.gradients))
    assert_equal(gradients, theirs.gradients, 1e-12)


CONTINUED = {
    "alone": (1, "--projector-lr 1e-2 --freeze-language-model"),
    "tower": (1, "--tower-lr 1e-2 --freeze-language-model"),
    "frozen": (1, ""),
    "lora": (1, "--lora --lora-merge --projector-lr 1e-2"),
    "pp2": (2, f"{_PP} --projector-lr 1e-2 --freeze-language-model --recompute-granularity full"),
    "dp2": (2, "--use-distributed-optimizer --projector-lr 1e-2 --freeze-language-model --bf16"),
    "cp2": (2, f"{_CP} --use-distributed-optimizer --tower-lr 1e-2 --projector-lr 1e-2"),
}


@pytest.mark.skipif(not ALL, reason="make vision runs it")
@pytest.mark.parametrize("case", CONTINUED)
def test_it_continues_to_the_bit(tmp_path: Path, case: str) -> None:
    """A checkpoint has nothing that is frozen: a tower that is not read again has random weights,
    and the run goes on with them.
    """
    (tmp_path / "pictures").mkdir()
    random = Random(1)
    lines = [json.dumps(chat(tmp_path, number, random)) for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    run_ranks(write_tiny_model, 1, tmp_path / "model")
    world_size, flags = CONTINUED[case]
    common = (
        f"--pretrained-checkpoint {tmp_path}/model --images --data-path {tmp_path}/chats.jsonl "
        "--seq-length 256 --sequence-packing --global-batch-size 4 --lr 1e-2 --eval-iters 0 "
        f"--split 100,0,0 --num-workers 0 {flags}"
    ).replace(_PP, f"{_PP} --decoder-first-pipeline-num-layers 2")
    weights = []
    for name, rest in (
        ("whole", f"--train-iters 3 --save {tmp_path}/saved --save-interval 2"),
        ("continued", f"--train-iters 3 --load {tmp_path}/saved --ckpt-step 2"),
    ):
        target = tmp_path / name
        arguments = f"{common} {rest} --save-hf {target}"
        code, output = train_forked(world_size, arguments.split())
        assert code == 0, output
        weights.append(read_folder(target))
    whole, continued = weights
    start = read_folder(tmp_path / "model")
    assert any(not torch.equal(whole[name].to(start[name].dtype), start[name]) for name in start)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


@pytest.mark.skipif(not ALL, reason="make vision runs it")
def test_chat_sees_what_transformers_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that answers about another picture in `chat` seems to have learned nothing."""
    (tmp_path / "pictures").mkdir()
    random = Random(1)
    names = [drawn(tmp_path, number, random)[0] for number in range(4)]
    run_ranks(write_tiny_model, 1, tmp_path / "model")
    options = ChatOptions(folder=str(tmp_path / "model"), max_new_tokens=MAX_TOKENS)
    speaker = open_speaker(tmp_path / "model", options)
    words = "what shape is it ?"
    message = {"role": "user", "content": words}
    found = [
        speaker.answer([message | {"images": [str(tmp_path / name)]}], options) for name in names
    ]
    asked = [{"image": name, "question": words} for name in names]
    expected = answers(tmp_path / "model", asked, tmp_path)
    assert [answer.strip() for answer in found] == [answer.strip() for answer in expected]
    assert len(set(found)) > 1
