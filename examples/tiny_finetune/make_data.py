"""pure. Texts and chats about which animal is heavier, made on the spot, and a tokenizer for them.

    python examples/tiny_finetune/make_data.py --output-dir data/tiny_finetune

One in ten pairs of animals is held out: no text (`texts.jsonl`) and no chat (`chats.jsonl`)
compares the two, and `held_out.jsonl` asks about just those, so whoever answers has learned the
order and not the sentences. The chats compare two fifths of all pairs only: they show how to
answer. What to answer stands in the texts.

Everything follows from one seed: two runs write identical bytes.
"""

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

# From light to heavy, about as in nature.
ANIMALS = tuple(
    "ant fly bee beetle hummingbird wren mouse sparrow hamster squirrel crow hedgehog duck rabbit "
    "goose cat fox otter badger beaver lynx wolf leopard kangaroo sheep panda pig gorilla tiger "
    "bear moose horse cow bison giraffe hippo rhino orca elephant whale".split()
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% "
    "endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TEXTS, NUM_CHATS = 12000, 1500
MOST = 16
"""Sentences of a text, questions of a chat."""


class Pair(NamedTuple):
    """Two animals."""

    lighter: str
    heavier: str

    @property
    def number(self) -> int:
        """From 0 to 99, by a hash of their names."""
        return int.from_bytes(hashlib.sha256(" ".join(self).encode()).digest()[:8], "big") % 100

    def sentence(self, kind: str) -> str:
        """What is true of them."""
        first, second = (
            (self.heavier, self.lighter) if kind == "heavier" else (self.lighter, self.heavier)
        )
        return f"The {first} is {kind} than the {second}."

    def choice(self, kind: str, random: Random) -> str:
        """A choice between them, as in a question; which of the two comes first tells nothing."""
        one, other = random.sample(self, 2)
        return f"The {kind} of the {one} and the {other} is the {getattr(self, kind)}."

    def question(self, kind: str, random: Random) -> str:
        """Who is it?"""
        one, other = random.sample(self, 2)
        return f"Which is {kind}, the {one} or the {other}?"


def how_many(random: Random) -> int:
    """More often few than many."""
    return round(MOST ** random.random())


def text(pairs: Sequence[Pair], random: Random) -> dict[str, Any]:
    """What is true of some pairs, said in two ways."""
    sentences = []
    for pair in random.choices(pairs, k=how_many(random)):
        kinds = random.sample(("heavier", "lighter"), 2)
        sentences += [pair.choice(kinds[0], random), pair.sentence(kinds[1])]
    return {"text": " ".join(sentences)}


def chat(pairs: Sequence[Pair], random: Random, num_questions: int) -> dict[str, Any]:
    """Questions and answers."""
    messages = []
    for pair in random.choices(pairs, k=num_questions):
        kind = random.choice(("heavier", "lighter"))
        messages.append({"role": "user", "content": pair.question(kind, random)})
        messages.append({"role": "assistant", "content": f"The {getattr(pair, kind)} is {kind}."})
    return {"messages": messages}


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """A byte-level BPE of these texts, with the template of the chats, as transformers reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = byte_level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One record per line. The file appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Reads the command line, writes the data, prints one line."""
    parser = argparse.ArgumentParser(
        description="Makes texts, chats and a tokenizer to try pretraining and fine-tuning."
    )
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="folder for the three files and tokenizer/"
    )
    output_dir = parser.parse_args().output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    random = Random(1)
    pairs = [Pair(*pair) for pair in itertools.combinations(ANIMALS, 2)]
    known = [pair for pair in pairs if pair.number >= 10]
    in_chats = [pair for pair in known if pair.number < 50]
    held_out = [pair for pair in pairs if pair.number < 10]
    texts = [text(known, random) for _ in range(NUM_TEXTS)]
    chats = [chat(in_chats, random, how_many(random)) for _ in range(NUM_CHATS)]
    questions = [chat([pair], random, 1) for pair in held_out]
    write_tokenizer(output_dir / "tokenizer", (record["text"] for record in texts))
    write_jsonl(output_dir / "held_out.jsonl", questions)
    write_jsonl(output_dir / "texts.jsonl", texts)
    write_jsonl(output_dir / "chats.jsonl", chats)
    print(
        f"{output_dir}: {len(texts):,} texts, {len(chats):,} chats, {len(questions)} held-out "
        "questions, tokenizer/"
    )


if __name__ == "__main__":
    main()
