"""transformers' own Trainer on flattened sequences, in one process or several.

torchrun --nproc-per-node 2 -m megatron.sft doctor --script
    tests/functional_tests/loops/transformers_trainer.py
"""

import argparse
import tempfile

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from megatron.packing.doctor.hook import examine_here
from megatron.packing.doctor.subjects.trainer_subject import subject_from_trainer
from tests.functional_tests.doctor_cases import DTYPES

VOCABULARY = 101


class PackingTrainer(Trainer):
    """Where users put what they change."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--autocast", action="store_true", help="weights in float32")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(DTYPES[options.dtype])
    lengths = torch.randint(4, 30, (16,)).tolist()
    rows = [torch.randint(VOCABULARY, (length,)).tolist() for length in lengths]
    data = [{"input_ids": row, "labels": list(row)} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PackingTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                bf16=options.autocast,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=3,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                average_tokens_across_devices=True,
                ddp_find_unused_parameters=False,
            ),
            data_collator=DataCollatorWithFlattening(),
            train_dataset=data,
        )
        examine_here(lambda: subject_from_trainer(trainer))
        trainer.train()


if __name__ == "__main__":
    main()
