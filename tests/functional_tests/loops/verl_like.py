"""A loop as verl's has it: padded rows of prompt and response, padding removed for the model and
put back for the loss, which is a mean over the tokens of all data-parallel ranks.

    megatron-sft doctor --script tests/functional_tests/loops/verl_like.py
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.packing.doctor.hook import examine_here
from megatron.packing.doctor.subject import Step, Subject, draw_weights
from tests.functional_tests.doctor_cases import DTYPES
from tests.functional_tests.doctor_toy import VOCABULARY, Fault, Layout, Toy

NUM_RANKS = 2
"""Data-parallel ranks, one after the other in this process."""


def pad_left(sequences: list[Tensor], fill: int) -> dict[str, Tensor]:
    """Rows of one width, which end together, [sequences, width]."""
    width = max(map(len, sequences))
    input_ids = torch.full((len(sequences), width), fill)
    attention_mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        input_ids[row, width - len(tokens) :] = tokens
        attention_mask[row, width - len(tokens) :] = 1
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
    }


def unpad(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and positions without padding, their places in the batch, and cu_seqlens."""
    indices = batch["attention_mask"].flatten().nonzero().flatten()
    lengths = batch["attention_mask"].sum(1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    tokens = batch["input_ids"].flatten()[indices]
    positions = batch["position_ids"].flatten()[indices]
    return tokens, positions, indices, cu_seqlens


def forward(model: Toy, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of tokens without padding, and their places in the batch."""
    tokens, positions, indices, cu_seqlens = unpad(batch)
    order = torch.arange(len(tokens))
    segments = torch.bucketize(order, cu_seqlens[1:], right=True)
    return model(tokens, Layout(segments, positions, order)), indices


def log_probs(model: Toy, batch: dict[str, Tensor]) -> Tensor:
    """Log-probability of the token behind each, [sequences, width]; 0 at padding."""
    logits, indices = forward(model, batch)
    targets = batch["input_ids"].roll(-1, 1).flatten()[indices]
    values = -F.cross_entropy(logits.double(), targets, reduction="none")
    padded = torch.zeros(batch["input_ids"].numel(), dtype=values.dtype)
    return padded.index_put((indices,), values).reshape(batch["input_ids"].shape)


def token_mean(values: Tensor, loss_mask: Tensor, num_tokens: int) -> Tensor:
    """This rank's part of the mean; ranks' gradients are averaged, hence the factor."""
    return (values * loss_mask).sum() / num_tokens * NUM_RANKS


def loss_of_rank(model: Toy, batch: dict[str, Tensor], num_tokens: int) -> Tensor:
    # The mask stands at the tokens that are predicted, one place behind what predicts them.
    loss_mask = F.pad(batch["response_mask"], (0, 1))[:, 1:]
    return token_mean(-log_probs(model, batch), loss_mask, num_tokens)


def train_step(model: Toy, of_ranks: list[dict[str, Tensor]]) -> float:
    """Gradients of one step, averaged over ranks; returns the loss."""
    model.zero_grad()
    num_tokens = sum(int(batch["response_mask"].sum()) for batch in of_ranks)
    total = 0.0
    for batch in of_ranks:
        loss = loss_of_rank(model, batch, num_tokens) / NUM_RANKS
        loss.backward()
        total += float(loss.detach())
    return total


def batch_of(samples: list, fill: int = 0) -> dict[str, Tensor]:
    batch = pad_left([one.tokens for one in samples], fill)
    mask = torch.zeros_like(batch["attention_mask"])
    for row, one in enumerate(samples):
        mask[row, mask.shape[1] - len(one.tokens) :] = one.trained.long()
    return {**batch, "response_mask": mask}


def subject(model: Toy) -> Subject:
    def logits(sequences, fill):
        out, _ = forward(model, pad_left(list(sequences), fill))
        return list(out.split([len(one) for one in sequences]))

    def step(packs):
        samples = [one for pack in packs for one in pack]
        mine = [samples[rank::NUM_RANKS] for rank in range(NUM_RANKS)]
        loss = train_step(model, [batch_of(part) for part in mine if part])
        change = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        numbers = iter(index % NUM_RANKS for index in range(len(samples)))
        replicas = tuple(tuple(next(numbers) for _ in pack) for pack in packs)
        return Step(change=change, loss=loss, replicas=replicas)

    def loss(packs):
        num_tokens = sum(int(one.trained.sum()) for pack in packs for one in pack)
        batches = [batch_of(list(pack)) for pack in packs]
        parts = [loss_of_rank(model, batch, num_tokens) / NUM_RANKS for batch in batches]
        return torch.stack(parts).sum()

    return Subject(
        name="verl-like loop",
        model=model,
        vocab_size=VOCABULARY,
        logits=logits,
        loss=loss,
        step=step,
        head=model.head,
        num_copies={"data-parallel ranks": NUM_RANKS},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Toy(Fault(kinds=("attention",) * 3, learned_positions=True))
    draw_weights(model)
    model = model.to(DTYPES[options.dtype]).train()
    examine_here(lambda: subject(model))
    raise SystemExit("this loop has no data: run it by megatron-sft doctor --script")


if __name__ == "__main__":
    main()
