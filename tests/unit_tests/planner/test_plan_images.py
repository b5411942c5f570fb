"""Plans for chats with images: what the tower costs, and where it leaves other stages waiting."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_images.make_data import PROCESSOR, TEXT, TOWER
from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.advice import Adviser, RunFacts
from megatron.planner.compare import PADDED_TO_LONGEST, compare
from megatron.planner.lengths import LengthOptions
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout
from megatron.sft.commands import length_sources
from megatron.sft.images.sizes import tower_cost
from megatron.sft.images.vision import read_vision
from tests.unit_tests.sft.data.test_image_chats import IDS, Words
from tests.unit_tests.sft.images.test_sizes import write

Image = pytest.importorskip("PIL.Image")


def test_lengths_and_costs_are_those_of_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels that are decoded for a plan take hours; a tower that is left out takes a fifth of a
    step.
    """
    config = {"model_type": "qwen3_vl", "vision_config": TOWER, "text_config": TEXT, **IDS}
    folder = write(tmp_path, config, preprocessor_config=PROCESSOR)
    content = io.BytesIO()
    Image.effect_noise((48, 32), 90).convert("RGB").save(content, "jpeg")
    (tmp_path / "half.jpg").write_bytes(content.getvalue()[:-300])
    turns = [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "ab"}]
    records = [{"messages": turns, "images": ["half.jpg"]}, {"messages": turns[1:]}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    words: Any = Words()
    monkeypatch.setattr(length_sources, "build_tokenizer", lambda *_: words)
    options = LengthOptions(
        source=str(chats), tokenizer_model=str(folder), images=True, tower_lr=1.0, train_turns="all"
    )
    found = length_sources.lengths_from(options, None, 2)
    assert found.lengths.tolist() == [10, 1]
    vision = read_vision(folder, 1 << 20)
    of_image = tower_cost(vision, trains_tower=True, trains_projector=False)(np.array([24]))[0]
    assert found.sequences.payload_costs is not None
    assert found.sequences.payload_costs.tolist() == [of_image, 0]
    costs = found.costing(3).sequences.payload_costs
    assert costs is not None
    assert costs.tolist() == [3 * of_image, 0]


def layout(num_stages: int) -> StepLayout:
    return StepLayout(
        num_ranks=1,
        capacity=100,
        alignment=Alignment(),
        cost=PackCost(linear=1.0, quadratic=0.0),
        model=StepModel(num_stages=num_stages),
    )


@pytest.mark.parametrize(("of_images", "layers"), [(0.0, None), (0.5, None), (60.0, 4), (160.0, 2)])
def test_fewer_layers_beside_the_tower(of_images: float, layers: int | None) -> None:
    """24 layers cost 100 tokens, a layer 4.2: images of 60, which count for 3 stages, take as long
    as 4.8 layers.
    """
    batch = Sequences(np.full(4, 25), payload_costs=np.full(4, of_images / 4))
    if not of_images:
        batch = Sequences(np.full(4, 25))
    sentences = Adviser([batch], layout(3), RunFacts(1, num_layers=24))._on_tower()
    assert bool(sentences) == (layers is not None)
    assert all(f"--decoder-first-pipeline-num-layers {layers} " in one for one in sentences)
    assert not Adviser([batch], layout(1), RunFacts(1, num_layers=24))._on_tower()


def test_padded_batches_encode_images_too() -> None:
    """Else packing seems to cost what it does not."""
    batch = Sequences(np.full(4, 25), payload_costs=np.full(4, 15.0))
    (outcome,) = [
        one for one in compare([batch], layout(1), {}, 25).outcomes if one.name == PADDED_TO_LONGEST
    ]
    assert outcome.step_cost == 4 * (25 + 15)
