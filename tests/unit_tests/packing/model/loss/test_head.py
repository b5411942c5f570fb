"""The output layer and loss of the tokens that count: the losses and gradients of all tokens at
once, exactly.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import cross_entropy as plain_cross_entropy

from megatron.packing.device import Device
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.loss.cross_entropy import Words
from megatron.packing.model.loss.head import Hidden, skip_masked_tokens
from megatron.packing.model.multipliers import LogitRule
from megatron.sft.model import cpu_support
from tests.unit_tests.packing.stubs import Ranks

NUM_TOKENS, WIDTH, NUM_WORDS = 21, 8, 16
PLAIN = Words(None, LogitRule())
LOSS_MASK = torch.tensor([0.0, 1.0, 0.5, 0.0, 0.0, 2.0, 1.0]).repeat(3)


def rows_and_weight(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = (
        torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(NUM_WORDS, WIDTH, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    return states, weight, torch.randint(12, (NUM_TOKENS,), generator=generator)


def gradients(losses: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        (losses * torch.linspace(-1, 2, len(losses), dtype=losses.dtype)).sum(), of
    )


@pytest.mark.parametrize(
    ("num_words", "rule"),
    [
        (None, LogitRule()),
        (12, LogitRule()),
        (12, LogitRule(scale=0.25)),
        (12, LogitRule(scale=0.5, softcap=2.0)),
    ],
)
@pytest.mark.parametrize("rows_at_a_time", [1, 4, NUM_TOKENS - 1, NUM_TOKENS, 1000])
@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 5e-2)]
)
def test_chunks_have_the_losses_and_gradients_of_the_whole(
    num_words, rule, rows_at_a_time, keeps_logits, dtype, limit, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", rows_at_a_time * NUM_WORDS)
    states, weight, labels = rows_and_weight(dtype)
    logits = (states.double() @ weight.double().t())[:, :num_words] * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    expected = plain_cross_entropy(logits, labels, reduction="none")
    losses, is_right = cross_entropy.CrossEntropy.apply(
        states, weight, labels, Words(num_words, rule, keeps_logits=keeps_logits), Ranks()
    )
    if dtype == torch.float64:  # in bfloat16 words tie
        assert torch.equal(is_right, logits.argmax(1) == labels)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=10 * limit)
    found = gradients(losses, states, weight)
    assert [gradient.dtype for gradient in found] == [dtype, dtype]
    for gradient, true in zip(found, gradients(expected, states, weight)):
        torch.testing.assert_close(gradient.double(), true.double(), rtol=limit, atol=20 * limit)


class LikeCuda(Tensor):
    """A tensor of the CPU whose factors in half precision have products in float32, as on a GPU."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One operation with at least one such tensor."""
        kwargs = dict(kwargs or {})
        if (wide := kwargs.pop("out_dtype", None)) is not None:
            args = [each.to(wide) for each in args]
        return super().__torch_function__(function, types, args, kwargs)


def test_products_of_chunks_are_added_up_in_float32_on_cuda():
    """Each rounded to bfloat16 before, they would be 1e-3 off, and written and read once more."""
    generator = torch.Generator().manual_seed(1)
    factors = [
        (
            torch.randn(rows, NUM_WORDS, generator=generator).bfloat16().t(),
            torch.randn(rows, WIDTH, generator=generator).bfloat16(),
        )
        for rows in (9, 9, 3)
    ]
    expected = torch.stack([left.double() @ right.double() for left, right in factors]).sum(0)
    errors = []
    for kind, device in ((LikeCuda, Device("cuda")), (Tensor, Device("cpu"))):
        total, first = None, None
        for left, right in factors:
            total = cross_entropy._add_product(
                total, left.as_subclass(kind), right.as_subclass(kind), torch.float32, device
            )
            first = total if first is None else first
            assert total.data_ptr() == first.data_ptr()
        assert total is not None
        assert total.dtype == torch.float32
        errors.append(float((total.as_subclass(Tensor) - expected).abs().max()))
    assert errors[0] < 5e-6
    assert errors[1] > 5e-3


def test_kernels_take_twice_the_rows_of_half_precision():
    """Logits in bfloat16 alone take half the bytes of those in float32."""
    plain, fused = Words(None, LogitRule()), Words(None, LogitRule(), is_fused=True)
    weight = torch.empty(1 << 20, 1, dtype=torch.bfloat16)
    states = torch.empty(1000, 1, dtype=torch.bfloat16)
    sizes = [
        cross_entropy._Chunks(len(rows), rows, weight, 1, words).parts[0].stop
        for rows, words in ((states, plain), (states, fused), (states.float(), fused))
    ]
    assert sizes == [256, 512, 256]


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_split_tokens_are_the_owners(rank, monkeypatch):
    """A row of another rank's, or one that two ranks add, has a loss and a gradient, too."""
    states = torch.arange(1.0, 17.0).view(8, 2)
    here, others = states.chunk(2)[rank], states.chunk(2)[1 - rank]
    here_ranks: Any = Ranks(2, rank)
    other_ranks: Any = Ranks(2, 1 - rank)
    rows = cross_entropy.Rows(torch.tensor([1, 3, 4, 7]), here_ranks, is_split=True)
    other = cross_entropy.Rows(rows.places, other_ranks, is_split=True)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
    part = slice(1, 4)
    sent = other.take(others, part)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.add_(sent))
    assert torch.equal(rows.take(here, part), states[[3, 4, 7]])
    # Ranks have parts of each row's gradient, which are summed: here 1 and 2.
    sent = torch.full((3, 2), 2.0)
    of_states = torch.zeros(4, 2)
    rows.add_(of_states, torch.ones(3, 2), part)
    expected = torch.zeros(8, 2)
    expected[[3, 4, 7]] = 3.0
    assert torch.equal(of_states, expected.chunk(2)[rank])


@pytest.mark.parametrize("keeps_logits", [False, True])
def test_kept_logits_are_computed_once(keeps_logits, monkeypatch):
    """An option that only takes memory would be seen in no loss."""
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", 5 * NUM_WORDS)
    states, weight, labels = rows_and_weight(torch.float64)
    products, rows = cross_entropy._Chunks.products, list[int]()

    def counted(chunks: Any, chunk: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(chunk))
        return products(chunks, chunk, weight)

    monkeypatch.setattr(cross_entropy._Chunks, "products", counted)
    words = PLAIN._replace(keeps_logits=keeps_logits)
    losses, _ = cross_entropy.CrossEntropy.apply(states, weight, labels, words, Ranks())
    gradients(losses, states, weight)
    assert sum(rows) == NUM_TOKENS * (1 if keeps_logits else 2)


def test_large_logits_neither_overflow_nor_lose_the_label():
    states, weight = (
        torch.full((2, 1), 300.0, requires_grad=True),
        torch.tensor([[-300.0], [300.0]]),
    )
    losses, is_right = cross_entropy.CrossEntropy.apply(
        states, weight, torch.tensor([0, 1]), PLAIN, Ranks()
    )
    assert losses.tolist() == [180_000.0, 0.0]
    assert is_right.tolist() == [False, True]


def test_weights_that_are_not_trained_get_no_gradient():
    states, weight, labels = rows_and_weight(torch.float64)
    losses, _ = cross_entropy.CrossEntropy.apply(states, weight.detach(), labels, PLAIN, Ranks())
    (found,) = gradients(losses, states)
    (expected,) = gradients(
        cross_entropy.CrossEntropy.apply(states, weight, labels, PLAIN, Ranks())[0], states
    )
    assert torch.equal(found, expected)


@pytest.fixture
def one_process() -> Iterator[None]:
    cpu_support.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt(**options) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        **options,
    )
    return GPTModel(
        config, get_gpt_layer_local_spec(), NUM_WORDS, NUM_TOKENS, position_embedding_type="rope"
    ).train()


def run(
    model: GPTModel, loss_mask: Tensor | None, batch: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.arange(NUM_TOKENS * batch).reshape(batch, NUM_TOKENS) % NUM_WORDS
    mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    positions = torch.arange(NUM_TOKENS).expand(batch, -1)
    losses = model(tokens, positions, mask, labels=tokens.roll(-1, dims=1), loss_mask=loss_mask)
    model.zero_grad()
    (losses * (1.0 if loss_mask is None else loss_mask)).sum().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("masked", ["some", "all", "none", None])
def test_a_model_trains_as_before_and_computes_no_logits_of_masked_tokens(
    batch, masked, monkeypatch
):
    by_kind = {"some": LOSS_MASK, "all": torch.zeros(NUM_TOKENS), "none": torch.ones(NUM_TOKENS)}
    loss_mask = None if masked is None else by_kind[masked].expand(batch, -1)
    plain_losses, plain_gradients = run(
        gpt(hidden_dropout=0.0, attention_dropout=0.0), loss_mask, batch
    )
    model, num_rows = gpt(hidden_dropout=0.0, attention_dropout=0.0), list[int]()
    assert skip_masked_tokens(model)
    assert skip_masked_tokens(model)  # once more changes nothing
    apply = cross_entropy.CrossEntropy.apply

    def counting(states: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        num_rows.append(len(others[1]))
        return apply(states, *others)

    monkeypatch.setattr(cross_entropy.CrossEntropy, "apply", counting)
    losses, found = run(model, loss_mask, batch)
    counted = torch.ones(batch, NUM_TOKENS) if loss_mask is None else (loss_mask != 0).float()
    assert num_rows == [int(counted.sum())]
    torch.testing.assert_close(losses, plain_losses * counted, rtol=1e-6, atol=1e-6)
    assert found.keys() == plain_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("one_process")
def test_logits_are_kept_for_backward_passes_alone(monkeypatch):
    """Evaluation would hold the logits of a whole microbatch, which no estimate counts."""
    model, kept = gpt(), list[bool]()
    skip_masked_tokens(model, keeps_logits=True)
    apply = cross_entropy.CrossEntropy.apply

    def noting(*arguments: Any) -> tuple[Tensor, Tensor]:
        kept.append(arguments[3].keeps_logits)
        return apply(*arguments)

    monkeypatch.setattr(cross_entropy.CrossEntropy, "apply", noting)
    run(model, None)
    tokens, mask = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    with torch.no_grad():
        model(tokens, tokens, mask, labels=tokens)
    assert kept == [True, False]


@pytest.mark.usefixtures("one_process")
def test_a_token_that_paths_share_is_right_for_each():
    """Accuracy divides by what the paths count; prompts that are shared would be missing above."""
    model = gpt()
    skip_masked_tokens(model)
    head = model.masked_tokens_head
    head._begin(
        model, (), {"packed_seq_params": SimpleNamespace(num_paths=torch.tensor([[3, 1, 2]]))}
    )
    states, weight = torch.eye(NUM_WORDS, WIDTH)[:3, None], torch.eye(NUM_WORDS, WIDTH)
    head._loss(torch.tensor([[0, 2, 2]]), Hidden(states, weight))
    assert head.num_right.item() == 3 + 2


@pytest.mark.usefixtures("one_process")
def test_without_labels_there_are_logits_of_all_tokens():
    model = gpt()
    skip_masked_tokens(model)
    tokens, mask = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    assert model(tokens, tokens, mask).shape == (1, 4, NUM_WORDS)


@pytest.mark.usefixtures("one_process")
def test_losses_of_ones_own_stay():
    class WithOwnLoss(GPTModel):
        def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
            return super().compute_language_model_loss(labels, logits) + 1

    model = gpt()
    model.__class__ = WithOwnLoss
    assert not skip_masked_tokens(model)
    fused = gpt(cross_entropy_loss_fusion=True)
    assert not skip_masked_tokens(fused)
    assert (
        type(fused.output_layer).forward.__get__(fused.output_layer) == fused.output_layer.forward
    )
