"""A loop as TRL's SFTTrainer has it: best-fit packs, restarting positions, a mean over the step.

megatron-sft doctor --script tests/functional_tests/loops/trl_like.py
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.packing.doctor.hook import examine_here
from megatron.packing.doctor.subject import Step, Subject, draw_weights
from tests.functional_tests.doctor_cases import DTYPES
from tests.functional_tests.doctor_toy import VOCABULARY, Fault, Layout, Toy

IGNORED = -100


@dataclass
class Example:
    input_ids: list[int]
    completion_mask: list[int]


def pack_best_fit(examples: list[Example], capacity: int) -> list[list[Example]]:
    """Puts each example, the longest first, where it leaves least room."""
    packs: list[list[Example]] = []
    for example in sorted(examples, key=lambda one: -len(one.input_ids)):
        room = {
            index: capacity - sum(len(one.input_ids) for one in pack)
            for index, pack in enumerate(packs)
        }
        fitting = [index for index, free in room.items() if free >= len(example.input_ids)]
        if fitting:
            packs[min(fitting, key=room.__getitem__)].append(example)
        else:
            packs.append([example])
    return packs


def collate(examples: list[Example]) -> dict[str, Tensor]:
    """One row of all examples, flattened."""
    input_ids = torch.cat([torch.tensor(one.input_ids) for one in examples])
    mask = torch.cat([torch.tensor(one.completion_mask) for one in examples])
    position_ids = torch.cat([torch.arange(len(one.input_ids)) for one in examples])
    labels = input_ids.masked_fill(mask == 0, IGNORED)
    labels[position_ids == 0] = IGNORED
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def borders(position_ids: Tensor) -> Tensor:
    """Sequence of each token: one begins where positions do."""
    return (position_ids == 0).cumsum(0)


def forward(model: Toy, batch: dict[str, Tensor]) -> Tensor:
    order = torch.arange(len(batch["input_ids"]))
    layout = Layout(borders(batch["position_ids"]), batch["position_ids"], order)
    return model(batch["input_ids"], layout)


def compute_loss(model: Toy, batch: dict[str, Tensor], num_items_in_batch: int) -> Tensor:
    logits = forward(model, batch)
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[1:]
    losses = F.cross_entropy(logits.double(), labels, reduction="none", ignore_index=IGNORED)
    return losses.sum() / num_items_in_batch


def loss_of_step(model: Toy, batches: list[dict[str, Tensor]]) -> Tensor:
    """The loss of all accumulated batches."""
    num_items = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    parts = [compute_loss(model, batch, num_items) for batch in batches]
    return torch.stack(parts).sum()


def train_step(model: Toy, batches: list[dict[str, Tensor]]) -> float:
    model.zero_grad()
    loss = loss_of_step(model, batches)
    loss.backward()
    return float(loss.detach())


def subject(model: Toy) -> Subject:
    def batch_of(pack):
        return collate([Example(one.tokens.tolist(), one.mask().int().tolist()) for one in pack])

    def logits(sequences, fill):
        batch = collate([Example(one.tolist(), [1] * len(one)) for one in sequences])
        return list(forward(model, batch).split([len(one) for one in sequences]))

    def step(packs):
        loss = train_step(model, [batch_of(pack) for pack in packs])
        change = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        return Step(change=change, loss=loss)

    return Subject(
        name="trl-like loop",
        model=model,
        vocab_size=VOCABULARY,
        logits=logits,
        loss=lambda packs: loss_of_step(model, [batch_of(pack) for pack in packs]),
        step=step,
        head=model.head,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Toy(Fault(kinds=("attention", "linear", "attention"), learned_positions=True))
    draw_weights(model)
    model = model.to(DTYPES[options.dtype]).train()
    examine_here(lambda: subject(model))
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        lengths = torch.randint(4, 30, (12,), generator=generator).tolist()
        examples = [
            Example(
                torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
                [0] * (length // 3) + [1] * (length - length // 3),
            )
            for length in lengths
        ]
        loss = train_step(model, [collate(pack) for pack in pack_best_fit(examples, 64)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
