"""Images and text of energon's kinds of samples, trained packed by the example, in any layout, as
each sample alone.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packing import plugin
from megatron.sft.model import cpu_support
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "multimodal"
sys.path.append(str(EXAMPLE))  # its files import one another, as Megatron-LM's do
from examples.multimodal import dataloader_provider, make_data, train  # noqa: E402

NUM_SAMPLES = 12
FLAGS = "--data-path {} --sequence-packing --max-seqlen-per-dp-cp-rank {}"
LAYOUTS = ["data", "tensor-model", "pipeline-model", "context"]
"""Kinds of parallelism, each of size 2."""
if os.environ.get("LAYOUTS") == "all":  # `make layouts`
    LAYOUTS += [" ".join(pair) for pair in combinations(LAYOUTS, 2)]
Gradients = dict[str, tuple[int | None, Tensor]]
"""By global name: the dimension that tensor parallel cuts, and this rank's part."""


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A metadataset of all four kinds."""
    return make_data.make(tmp_path_factory.mktemp("images") / "data", 12, seed=3)


def global_names(gpt: Any) -> dict[str, Any]:
    """Parameters by the names that they have in a model of one stage."""
    layers = {f"decoder.layers.{i}.": x.layer_number - 1 for i, x in enumerate(gpt.decoder.layers)}

    def name_of(name: str) -> str:
        found = re.match(r"decoder\.layers\.\d+\.", name)
        return name if found is None else f"decoder.layers.{layers[found[0]]}.{name[found.end() :]}"

    return {name_of(name): parameter for name, parameter in gpt.named_parameters()}


def dimension_of(parameter: Any) -> int | None:
    """The dimension that is cut over tensor-parallel ranks."""
    is_cut = parallel_state.get_tensor_model_parallel_world_size() > 1 and getattr(
        parameter, "tensor_model_parallel", False
    )
    return parameter.partition_dim if is_cut else None


def fill(gpt: Any) -> None:
    """Sets each parameter to a function of its name, whatever the layout."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_names(gpt).items():
        shape, dimension = list(parameter.shape), dimension_of(parameter)
        if dimension is not None:
            shape[dimension] *= size
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=random, dtype=torch.float64) * 0.3
        part = whole if dimension is None else whole.chunk(size, dimension)[rank]
        parameter.data = part.contiguous()


class Start(NamedTuple):
    """What both runs begin with."""

    arguments: Any
    config: Any
    groups: Any


def start(path: Path, kind: str = "data") -> Start:
    """The layout of the command line, in float64."""
    kinds = kind.split()
    flags = FLAGS.format(path, 200 if "context" in kinds else 400)
    flags += "".join(f" --{one}-parallel-size 2" for one in kinds if one != "data")
    arguments = train.arguments_of(flags.split())
    cpu_support.install()
    parallel_state.initialize_model_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
    )
    config = train.config_of(arguments)
    config.params_dtype = config.pipeline_dtype = torch.float64
    config.finalize_model_grads_func = finalize_sums
    return Start(arguments, config, ProcessGroupCollection.use_mpu_process_groups())


def finalize_sums(model: Any, num_tokens: object = None, **options: Any) -> None:
    """megatron-core's, but for the division by the number of tokens, rounded to float32."""
    finalize_model_grads(model, None, **options)


def train_packed(path: Path, kind: str) -> Any:
    """A step of the example: its loss, this rank's gradients of the sum, the step's account."""
    arguments, config, groups = start(path, kind)
    store = train.store_of(arguments)
    store.min_bytes_by_key = 0
    with plugin.install(config, arguments, payloads=store):
        gpt = train.model_of(config, groups).double()
        fill(gpt)
        encoded: list[int] = []
        if gpt.pre_process:
            gpt.tower.tower.register_forward_pre_hook(
                lambda _, given: encoded.append(len(given[0]))
            )
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
        losses: Any = get_forward_backward_func()(
            forward_step_func=train.forward_step,
            data_iterator=dataloader_provider.train_loader(path, groups),
            model=model,
            num_microbatches=NUM_SAMPLES // groups.dp.size(),
            seq_length=1,
            micro_batch_size=1,
        )
    total = sum((loss["lm loss"] for loss in losses), torch.zeros(2, dtype=torch.float64))
    torch.distributed.all_reduce(total)
    gradients = {
        name: (dimension_of(parameter), parameter.main_grad.clone())
        for name, parameter in global_names(gpt).items()
    }
    place = groups.tp.rank(), groups.dp.size(), sum(encoded)
    return (total[0] / total[1]).item(), gradients, losses.batch.stats, place


def train_alone(path: Path) -> tuple[float, dict[str, Tensor], int]:
    """Each sample by itself, unpacked, by megatron-core's own layers and torch's cross entropy."""
    _, config, groups = start(path)
    gpt = train.model_of(config, groups, get_gpt_layer_local_spec()).double()
    fill(gpt)
    loader = dataloader_provider.train_loader(path, groups)
    total, num_tokens, num_images = torch.zeros((), dtype=torch.float64), 0, 0
    for _ in range(NUM_SAMPLES):
        sample = next(loader)
        tokens, mask = (torch.from_numpy(sample[name]) for name in ("tokens", "loss_mask"))
        images = sample.get("payloads", {"pixels": []})["pixels"]
        rows = iter(gpt.tower.tower(images) if images else ())
        words = gpt.embedding.word_embeddings.weight
        hidden = [next(rows) if token == train.IMAGE else words[token] for token in tokens.tolist()]
        assert next(rows, None) is None
        logits = gpt(
            tokens[None],
            torch.from_numpy(sample["position_ids"])[:, None],
            None,
            decoder_input=torch.stack(hidden)[:, None],
        )
        losses = cross_entropy(logits[0], tokens.roll(-1), reduction="none")
        total = total + (losses * mask)[:-1].sum()
        num_tokens += int(mask.sum())
        num_images += len(images)
    total.backward()
    gradients = {name: parameter.grad for name, parameter in global_names(gpt).items()}
    assert all(gradient is not None for gradient in gradients.values())
    return (total / num_tokens).item(), gradients, num_images  # type: ignore[return-value]


@lru_cache(maxsize=1)
def alone(path: Path) -> tuple[float, dict[str, Tensor], int]:
    return run_ranks(train_alone, 1, path)[0]


def wholes(parts: list[list[Tensor]], dimension: int | None) -> list[Tensor]:
    """What each tensor-parallel rank has, put together where it is cut."""
    if dimension is None:
        return [part for its in parts for part in its]
    return [torch.cat(pair, dimension) for pair in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_images_train_packed_as_each_sample_alone(kind: str, blend: Path) -> None:
    """Pixels of another sample, positions that run on through a pack, embeddings merged after a
    cut: each trains on, only worse, and each was shipped by somebody.
    """
    loss, gradients, num_images = alone(blend)
    assert num_images > NUM_SAMPLES
    ranks = run_ranks(train_packed, 2 ** len(kind.split()), blend, kind)
    # Name -> what each tensor-parallel rank has of it, and where it is cut.
    found: dict[str, list[list[Tensor]]] = {}
    cuts: dict[str, int | None] = {}
    for its_loss, its_gradients, stats, (rank, num_replicas, encoded) in ranks:
        assert its_loss == pytest.approx(loss, rel=1e-12)
        assert stats.microbatches > 1 or num_replicas > 1
        assert encoded < num_images or kind == "pipeline-model", "each rank encodes all images"
        assert (stats.moved_payload_bytes > 0) == (num_replicas > 1)
        for name, (cuts[name], part) in its_gradients.items():
            found.setdefault(name, [[], []])[rank].append(part)
    assert found.keys() == gradients.keys()
    for name, expected in gradients.items():
        for whole in wholes(found[name], cuts[name]):
            scale = float(expected.abs().max())
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12 * max(scale, 1.0))
            assert scale > 1e-6, f"{name} has no gradient to compare"


def test_keys_restore_after_a_resume_on_another_number_of_ranks(blend: Path) -> None:
    """Delayed sequences are in checkpoints by key: read as another record, their images would be
    somebody else's.
    """

    def loader_of(rank: int, num_ranks: int) -> Any:
        groups: Any = SimpleNamespace(
            **{name: SimpleNamespace(rank=lambda: 0) for name in ("tp", "cp", "pp")},
            dp=SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks),
        )
        return dataloader_provider.train_loader(blend, groups)

    loaders = [loader_of(rank, 2) for rank in range(2)]
    samples = [next(loader) for _ in range(5) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    resumed = loader_of(1, 3)
    resumed.load_state_dict(states)
    next(resumed)
    for sample in samples:
        again = resumed.restore_sample(sample["__restore_key__"])
        assert again["__key__"] == sample["__key__"]
        its = (one.get("payloads", {"pixels": []})["pixels"] for one in (sample, again))
        assert all(torch.equal(*pair) for pair in zip(*its, strict=True))


def test_the_example_runs(blend: Path) -> None:
    """Users copy it; it says what its images cost and how far they travelled."""
    given = f"--data-path {blend} --sequence-packing --max-seqlen-per-dp-cp-rank 400"
    more = "--train-iters 2 --num-workers 1 --prefetch-global-batches 1"
    status, output = train_forked(2, [*given.split(), *more.split()], train.main)
    assert status == 0, output
    steps = re.findall(
        r"step \d loss (\S+) .* samples with images (\d+) of 32, .* moved (\d+)", output
    )
    assert len(steps) == 2, output
    assert all(int(count) > 16 and int(moved) > 0 for _, count, moved in steps), output
