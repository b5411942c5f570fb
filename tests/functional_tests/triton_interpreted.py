"""Kernels in Triton's interpreter, beside torch's operations.

A program: whether kernels are interpreted is decided when Triton is imported. The test of it is in
`test_triton_interpreted`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.model import fused_sums
from megatron.packing.model.attention import fused_rotary, rotary
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.loss.cross_entropy import CrossEntropy, Words
from megatron.packing.model.loss.fused_cross_entropy import row_statistics, write_gradients
from megatron.packing.model.multipliers import LogitRule
from tests.functional_tests.ranks import run_ranks

# Rows, columns of logits, words among them: more than a program holds, as many, and none.
SHAPES = ((5, 9000, 8999), (3, 4096, 4096), (4, 100, 1), (2, 50, 0), (0, 10, 10))
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Of gradients, which are rounded to these."""
NUM_ROWS, WIDTH, NUM_WORDS, NUM_RANKS = 7, 6, 5000, 2
# Tokens, rows of a batch, heads, channels of a head, channels that are turned.
HEADS = (
    (5, 1, 3, 16, 16),
    (3, 2, 40, 256, 256),
    (4, 1, 8, 80, 80),
    (3, 1, 4, 20, 12),
    (0, 1, 2, 8, 8),
)


def compare_kernels(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Statistics of rows and gradients of logits, for labels of which some are another rank's."""
    num_rows, num_columns, num_words = shape
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    logits = logits.to(dtype)
    labels = torch.randint(-1, max(num_words, 1), (num_rows,), generator=generator)
    if not num_words:
        labels.fill_(-1)
    found = row_statistics(logits, labels, num_words)
    wide = logits[:, :num_words].to(torch.promote_types(dtype, torch.float32))
    is_here = labels >= 0
    if num_words and num_rows:
        torch.testing.assert_close(found.log_sum, wide.logsumexp(1))
        assert torch.equal(found.largest, wide.amax(1))
        of_label = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
        assert torch.equal(found.of_label, of_label.where(is_here, 0.0))
    elif num_rows:
        assert found.log_sum.isneginf().all()
        assert (found.largest == torch.finfo(wide.dtype).min).all()
    log_sum = found.log_sum if num_words else torch.zeros_like(found.log_sum)
    of_loss = torch.randn(num_rows, generator=generator, dtype=wide.dtype)
    expected = torch.zeros(num_rows, num_columns, dtype=wide.dtype)
    expected[:, :num_words] = (wide - log_sum.unsqueeze(1)).exp()
    expected[is_here.nonzero().squeeze(1), labels[is_here]] -= 1
    expected *= of_loss.unsqueeze(1)
    write_gradients(logits, labels, log_sum, of_loss, num_words)
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(logits, expected.to(dtype), rtol=bound, atol=bound)


def compare_rotation(
    dtype: torch.dtype, shape: tuple[int, int, int, int, int], *, is_interleaved: bool
) -> None:
    """Heads that are slices of a product and dense ones, turned and turned back."""
    *sizes, width, rotated = shape
    generator = torch.Generator().manual_seed(1)
    product = torch.randn(*sizes, 2 * width + 3, generator=generator).to(dtype)
    angles = torch.randn(sizes[0], 1, 1, rotated // 2, generator=generator, dtype=torch.float64)
    twice = angles.repeat_interleave(2, -1) if is_interleaved else torch.cat((angles, angles), -1)
    cos, sin, _ = rotary.turns_of(twice, width, is_interleaved, 1.3, dtype)
    sliced = product[..., 3 : 3 + width]
    for x in (sliced, sliced.contiguous(), product[..., :1].expand_as(sliced)):
        for sign in (1, -1):
            wide = x.double()
            expected = rotary._turned(wide, cos.double(), sin.double(), is_interleaved, sign)
            found = fused_rotary.turned(x, cos, sin, is_interleaved, sign)
            assert found.is_contiguous()
            bound = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), expected, rtol=bound, atol=1e-6)


def compare_sums(dtype: torch.dtype, num_sums: int, num_rows: int, width: int) -> None:
    """Rows beyond one program's, and none."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_sums * num_rows, width, generator=generator).to(dtype)
    places = torch.randperm(len(rows), generator=generator).view(num_sums, num_rows)
    expected = rows.double()[places].sum(1)
    found = fused_sums.row_sums(rows, places)
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=1e-5)


def losses_and_gradients(words: Words, rows_at_a_time: int) -> list[Tensor]:
    """Of this rank: losses, right answers, gradients of the states and of its part of the
    weight.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own = NUM_WORDS // size
    cross_entropy._CHUNK_LOGITS = rows_at_a_time * own
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(NUM_WORDS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_WORDS - 8, (NUM_ROWS,), generator=generator)
    states, weight = states.requires_grad_(), weight[rank * own :][:own].requires_grad_()
    group: Any = dist.group.WORLD
    losses, is_right = CrossEntropy.apply(states, weight, labels, words, group)
    of_states, of_weight = torch.autograd.grad(losses.square().sum(), (states, weight))
    return [losses, is_right, of_states, of_weight]


def compare_ranks() -> None:
    """On each rank: with the vocabulary cut, in one chunk and in several."""
    for rows_at_a_time in (NUM_ROWS, 3):
        for num_words in (None, NUM_WORDS - 8):
            plain, fused, kept = (
                losses_and_gradients(
                    Words(num_words, LogitRule(), is_fused, keeps_logits), rows_at_a_time
                )
                for is_fused, keeps_logits in ((False, False), (True, False), (True, True))
            )
            torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
            assert all(map(torch.equal, kept, fused))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    for each in TOLERANCES:
        for one in SHAPES:
            compare_kernels(each, one)
    for each in (torch.float32, torch.bfloat16):
        for heads in HEADS:
            compare_rotation(each, heads, is_interleaved=False)
            compare_rotation(each, heads, is_interleaved=True)
        for sizes in ((5, 3, 1100), (2, 8, 1024), (4, 1, 20), (0, 2, 16)):
            compare_sums(each, *sizes)
    for num_ranks in (1, NUM_RANKS):
        run_ranks(compare_ranks, num_ranks)
    print("equal")
