"""The options as megatron-core's config, and the demands of packing on it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.packing.device import CPU, Device
from megatron.packing.flags import FlagError
from megatron.packing.scheduling.cost import PackCost
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from tests.unit_tests.sft.command_line import parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def config_of(arguments="", world_size=8):
    return parse(arguments, world_size)


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(1, 128), (128, 128), (129, 256), (264, 384), (50257, 50304)]
)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_padded_vocabulary_does_not_depend_on_the_layout(tensor, vocab_size, expected):
    """Rows of padding take part in the softmax: with more of them under tensor parallel, the loss
    is another.
    """
    from megatron.sft.model.build import padded_vocab_size

    assert (
        padded_vocab_size(vocab_size, config_of(f"--tensor-model-parallel-size {tensor}"))
        == expected
    )


def test_padded_vocabulary_splits_evenly():
    """A multiple that the tensor-parallel size does not divide is still split evenly, by more
    padding.
    """
    from megatron.sft.model.build import padded_vocab_size

    config = config_of("--make-vocab-size-divisible-by 6 --tensor-model-parallel-size 4")
    assert padded_vocab_size(13, config) == 24
    assert padded_vocab_size(13, config_of("--make-vocab-size-divisible-by 1")) == 13


LAYOUTS = [
    "",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2 --context-parallel-size 2 --tensor-model-parallel-size 2",
    "--disable-bias-linear --num-experts 4 --expert-model-parallel-size 2",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2",
]


@pytest.mark.parametrize("arguments", LAYOUTS)
@pytest.mark.parametrize("device", [CPU, DescribedGPU()])
def test_config_of_every_layout_suits_packing(arguments, device):
    """A demand of packing that the trainer's own config misses stops every run of that layout, or
    hangs it.
    """
    from megatron.packing.model.pipeline import check_config
    from megatron.sft.model.build import build_transformer_config

    config = config_of(f"--sequence-packing {arguments}")
    built = build_transformer_config(config, device)
    check_config(built, device)
    assert built.max_seqlen_per_dp_cp_rank == 128 // config.parallel.context_parallel_size
    assert built.sequence_packing_scheduler == "default"
    assert built.sequence_packing_options.over_length_policy == "error"
    assert built.sequence_packing_options.scheduling is config.scheduling
    assert built.virtual_pipeline_model_parallel_size == config.num_virtual_stages


@pytest.mark.parametrize("arguments", LAYOUTS)
def test_config_without_packing_has_no_scheduler(arguments):
    """The padded baseline would be packed, and be compared with itself."""
    from megatron.sft.model.build import build_transformer_config

    built = build_transformer_config(config_of(arguments), CPU)
    assert getattr(built, "sequence_packing_scheduler", None) is None
    assert built.max_seqlen_per_dp_cp_rank is None
    assert built.variable_seq_lengths  # microbatches are as long as their longest row
    assert built.calculate_per_token_loss


def test_options_reach_the_config():
    """An option that is parsed and not passed on is silently ignored."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron.sft.model.build import build_transformer_config

    built = build_transformer_config(
        config_of(
            "--swiglu --normalization RMSNorm --norm-epsilon 1e-6 --group-query-attention "
            "--num-query-groups 2 --kv-channels 16 --ffn-hidden-size 96 --disable-bias-linear "
            "--add-qkv-bias --qk-layernorm --hidden-dropout 0.1 --attention-dropout 0.2 "
            "--init-method-std 0.01 --num-experts 4 --moe-router-topk 3 --moe-router-dtype fp32 "
            "--attention-backend flash --cp-comm-type a2a --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 3 --expert-model-parallel-size 2 "
            "--moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.5 --bf16 --sequence-parallel "
            "--context-parallel-size 2 --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2 --over-length-policy drop --sequence-packing "
            "--max-seqlen-per-dp-cp-rank 200"
        ),
        CPU,
    )
    expected = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.2,
        "init_method_std": 0.01,
        "num_moe_experts": 4,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 48,
        "moe_aux_loss_coeff": 0.5,
        "moe_router_dtype": "fp32",
        "attention_backend": AttnBackend.flash,
        "cp_comm_type": "a2a",
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "moe_router_load_balancing_type": "aux_loss",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "max_seqlen_per_dp_cp_rank": 200,
    }
    assert built.sequence_packing_options.over_length_policy == "drop"
    assert {name: getattr(built, name) for name in expected} == expected


def test_one_expert_per_token():
    """Top-1 routing with the softmax after the choice has no gradient for the router: a new model
    would never learn to route. A folder's model may be one, which megatron-core's config refuses.
    """
    from megatron.packing.model.architecture import architecture
    from megatron.sft.model.build import build_transformer_config
    from megatron.sft.model.gpt_additions import prepare_config

    with pytest.raises(FlagError, match="--moe-router-topk 1 needs --moe-router-pre-softmax"):
        config_of("--disable-bias-linear --num-experts 4 --moe-router-topk 1")
    built = build_transformer_config(
        config_of(
            "--disable-bias-linear --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax"
        ),
        CPU,
    )
    assert (built.moe_router_topk, built.moe_router_pre_softmax) == (1, True)
    model = replace(config_of("").model, num_experts=4, moe_router_topk=1)
    assert architecture(model)["moe_router_pre_softmax"]
    prepare_config(built, model)
    assert not built.moe_router_pre_softmax


def test_exactness_tests_may_ask_for_float64():
    """In float32 no layout can be told from another by 1e-12."""
    from megatron.sft.model.build import build_transformer_config

    built = build_transformer_config(config_of(), CPU, params_dtype=torch.float64)
    assert built.params_dtype == built.pipeline_dtype == torch.float64


def test_sequence_parallel_without_tensor_parallel_is_off():
    """megatron-core refuses it, but scripts pass it for every layout."""
    from megatron.sft.model.build import build_transformer_config

    assert not build_transformer_config(config_of("--sequence-parallel"), CPU).sequence_parallel


def suitable(**changes):
    """A config that packing takes on CPU with an interleaved pipeline, with changes."""
    values = {
        "calculate_per_token_loss": True,
        "hybrid_context_parallel": False,
        "variable_seq_lengths": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
        "mtp_num_layers": None,
        "recompute_granularity": "full",
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss=True"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel=False"),
        ({"variable_seq_lengths": False}, "variable_seq_lengths=True"),
        ({"overlap_p2p_comm": False}, "overlap_p2p_comm=True and batch_p2p_comm=False"),
        ({"batch_p2p_comm": True}, "overlap_p2p_comm=True and batch_p2p_comm=False"),
        ({"deallocate_pipeline_outputs": True}, "deallocate_pipeline_outputs=False"),
    ],
)
def test_unsuitable_config_is_refused_by_name(changes, words):
    """Each of these trains on wrongly weighted or mixed up tokens, or hangs, without a word."""
    from megatron.packing.model.pipeline import check_config

    check_config(suitable(), CPU)
    with pytest.raises(ValueError, match="sequence packing needs TransformerConfig") as failure:
        check_config(suitable(**changes), CPU)
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({"deallocate_pipeline_outputs": True}, "cuda"),
        (
            {
                "virtual_pipeline_model_parallel_size": None,
                "overlap_p2p_comm": False,
                "batch_p2p_comm": True,
            },
            "cpu",
        ),
        (
            {
                "pipeline_model_parallel_size": 1,
                "virtual_pipeline_model_parallel_size": None,
                "variable_seq_lengths": False,
            },
            "cpu",
        ),
    ],
)
def test_what_does_no_harm_is_accepted(changes, device):
    """Demands beyond need would refuse the layouts that most people run."""
    from megatron.packing.model.pipeline import check_config

    check_config(suitable(**changes), Device(device))


def test_a_config_without_the_newer_fields_is_accepted():
    """hybrid_context_parallel is not in every megatron-core."""
    from megatron.packing.model.pipeline import check_config

    config = suitable()
    del config.hybrid_context_parallel
    check_config(config, CPU)


def sequence_cost(config, vocab_size):
    from megatron.packing.step.settings import cost_of
    from megatron.sft.model.build import build_transformer_config, padded_vocab_size

    return cost_of(build_transformer_config(config, CPU), padded_vocab_size(vocab_size, config))


def test_sequence_cost():
    """A cost without the output layer calls short sequences of a small model cheaper than they
    are."""
    small, large = sequence_cost(config_of(), 1000), sequence_cost(config_of(), 100000)
    assert 0 < small.linear < large.linear
    assert 0 < small.quadratic == large.quadratic
    assert large.linear - small.linear == 6 * 64 * (
        100096 - 1024
    )  # forward and backward, rows padded to 128
    deeper = sequence_cost(config_of("--num-layers 16"), 1000)
    assert deeper.quadratic == 2 * small.quadratic
    assert (
        sequence_cost(config_of("--group-query-attention --num-query-groups 2"), 1000).linear
        < small.linear
    )


def test_sequence_cost_does_not_depend_on_the_layout():
    """The TFLOP/s of two layouts could not be compared."""
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    assert sequence_cost(config_of(layout), 1000) == sequence_cost(config_of(), 1000)


def test_each_context_parallel_rank_moves_the_weights():
    """Microbatches would seem as much cheaper as ranks share a sequence, and packs be made too
    small.
    """
    alone, shared = (
        sequence_cost(config_of(), 1000),
        sequence_cost(config_of("--context-parallel-size 4"), 1000),
    )
    assert (shared.linear, shared.quadratic) == (alone.linear, alone.quadratic)
    assert shared.fixed == 4 * alone.fixed > 0


@pytest.fixture
def fitted_file(tmp_path):
    """A file as calibrate writes it for the model of `config_of()` with a vocabulary of 1000."""
    from megatron.packing.scheduling.fitted_cost import Fit, write_fitted_cost
    from megatron.packing.step.settings import model_of
    from megatron.sft.model.build import build_transformer_config

    fit = Fit(PackCost(linear=2e-5, quadratic=4e-9, fixed=6e-3), 0.0, 0.0)
    model = model_of(build_transformer_config(config_of(), CPU), 1024)
    write_fitted_cost(tmp_path / "cost.json", fit, [], model, {})
    return tmp_path / "cost.json"


def agreed(arguments, other_ranks, monkeypatch):
    """What training schedules by, where the other ranks bring these costs."""
    from megatron.sft.model import build as model

    monkeypatch.setattr(model, "gathered", lambda cost: [cost, *other_ranks])
    config = config_of(arguments)
    return model.agreed_cost(config, model.build_transformer_config(config, CPU), vocab_size=1000)


def test_measured_cost_is_that_of_a_rank(fitted_file, monkeypatch):
    """A prediction of the whole model's time would be off by the ranks that share it."""
    arguments = (
        f"--sequence-packing --pack-cost {fitted_file} --tensor-model-parallel-size 2 "
        "--context-parallel-size 2"
    )
    found = agreed(arguments, [], monkeypatch)
    assert replace(found, head=0.0) == PackCost(linear=5e-6, quadratic=1e-9, fixed=3e-3)
    assert 0 < found.head < found.linear  # as much of it as of the FLOPs
    assert agreed("--sequence-packing", [], monkeypatch) is None


def test_measured_cost_of_another_model_is_refused(fitted_file, monkeypatch):
    """It would schedule, and predict, by the times of a model that this run does not train."""
    arguments = f"--sequence-packing --pack-cost {fitted_file}"
    with pytest.raises(
        ValueError,
        match=r'hidden_size is 64 there, but 128 here; .*; dtype is "float32" there, but "bf',
    ):
        agreed(f"{arguments} --hidden-size 128 --bf16", [], monkeypatch)


def test_files_that_differ_between_machines_are_refused(fitted_file, monkeypatch):
    """Each machine would give sequences to other ranks than its peers expect: a hang, or lost
    samples.
    """
    with pytest.raises(
        ValueError, match="must be the same file on all machines, but differs; copy it"
    ):
        agreed(f"--sequence-packing --pack-cost {fitted_file}", [PackCost(1.0, 1.0)], monkeypatch)
