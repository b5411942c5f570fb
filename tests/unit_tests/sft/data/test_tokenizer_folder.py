"""Folders of tokenizers, built as released ones are: their tokens are those of tokenizer.json."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.hf_tokenizer import build_hugging_face, note_on_rows
from megatron.sft.data.records.content import Passage
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.tokenizer_probe import encode_alike
from megatron.sft.model.huggingface import companions

pytest.importorskip("torch")  # before transformers, which remembers if there was none
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import (  # noqa: E402
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "\n\n1. one\n\n2. two 12345 12345 2026 2026\n    return  x\n",
    "don't I'LL cafe\u0301 café 你好\uff0c世界 (ok) <mask> <s>[INST] hi [/INST] ok</s> x <unk>y",
    "<|im_start|>user\n hi<|im_end|>\n <bos>a <|endoftext|>b",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def splits(*patterns: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, byte_level])


def digits() -> Any:
    parts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return pre_tokenizers.Sequence(parts)


def begin(token: str, number: int) -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def byte_level(
    split: Any, special: list[str], normalizer: Any = None, post: Any = None, **model: Any
) -> Tokenizer:
    bpe = Tokenizer(models.BPE(**model))
    bpe.normalizer, bpe.pre_tokenizer, bpe.post_processor = normalizer, split, post
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS * 3, trainer)
    return bpe


def sentencepiece(normalizer: Any, split: Any) -> Tokenizer:
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    bpe.normalizer, bpe.pre_tokenizer, bpe.post_processor = normalizer, split, begin("<s>", 1)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence(steps)
    bpe.add_special_tokens(special)
    return bpe


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=110, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@dataclass(frozen=True)
class Case:
    """A folder, and how transformers 5 reads it."""

    tokenizer: Any
    model_type: str
    settings: dict[str, Any]
    rebuilt_as: str | None = None
    """Class that reads other tokens."""
    is_forced: bool = False
    files: dict[str, Any] = field(default_factory=dict)


def names(kind: str, eos: str, **more: Any) -> dict[str, Any]:
    return {"tokenizer_class": kind, "eos_token": eos} | more


END, START = CHATML[2], {"bos_token": "<s>", "unk_token": "<unk>"}
DUMMY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
DEEPSEEK = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ\u30a0-ヿ]+", r"[\p{L}\p{M}]+|\s+| ?[\p{P}\p{S}]+")
CASES = {
    "smollm2": lambda: Case(
        byte_level(digits(), CHATML),
        "llama",
        names("GPT2Tokenizer", END, bos_token=CHATML[1], unk_token=CHATML[0]),
        "GPT2Tokenizer",
    ),
    "gpt2": lambda: Case(
        byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), CHATML),
        "gpt2",
        names("GPT2Tokenizer", END),
    ),
    "qwen3": lambda: Case(
        byte_level(splits(LLAMA3.replace("{1,3}", "")), CHATML, normalizers.NFC()),
        "qwen3",
        names("Qwen2Tokenizer", END),
    ),
    "own qwen3": lambda: Case(
        byte_level(splits(LLAMA3), CHATML),
        "qwen3",
        names("Qwen2Tokenizer", END),
        "Qwen2Tokenizer",
    ),
    "own qwen2": lambda: Case(
        byte_level(splits(LLAMA3), CHATML),
        "qwen2",
        names("PreTrainedTokenizerFast", END, pad_token=CHATML[0]),
        "Qwen2Tokenizer",
        is_forced=True,
    ),
    "llama3": lambda: Case(
        byte_level(splits(LLAMA3), CHATML, post=begin(CHATML[0], 0), ignore_merges=True),
        "llama",
        names("PreTrainedTokenizerFast", END, bos_token=CHATML[0]),
    ),
    "deepseek": lambda: Case(
        byte_level(splits(*DEEPSEEK), CHATML, post=processors.ByteLevel()),
        "deepseek_v3",
        names("LlamaTokenizerFast", END, bos_token=CHATML[0], add_bos_token=True),
    ),
    "own cohere": lambda: Case(
        byte_level(splits(LLAMA3), ["<BOS_TOKEN>", *CHATML]),
        "cohere",
        names("CohereTokenizerFast", END, bos_token="<BOS_TOKEN>"),
        "CohereTokenizer",
    ),
    "llama2": lambda: Case(
        sentencepiece(DUMMY, None),
        "llama",
        names("LlamaTokenizer", "</s>", **START, legacy=False),
        "LlamaTokenizer",
    ),
    "mistral": lambda: Case(
        sentencepiece(None, pre_tokenizers.Metaspace("▁", "first", split=False)),
        "llama",
        names("LlamaTokenizer", "</s>", **START, legacy=False),
    ),
    "t5": lambda: Case(unigram(), "t5", names("T5Tokenizer", "</s>", extra_ids=0), "T5Tokenizer"),
}


def write(folder: Any, case: Case) -> str:
    folder.mkdir(exist_ok=True)
    case.tokenizer.save(str(folder / "tokenizer.json"))
    contents = {"config": {"model_type": case.model_type}, "tokenizer_config": case.settings}
    for name, content in (contents | case.files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def export(folder: str, target: Any, model_type: str) -> Any:
    """The tokenizer of a folder as a run reads it, and its files as an export has them."""
    tokenizer: Any = build_hugging_face(folder)
    data = SimpleNamespace(resolved_tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": model_type}))
    companions._write_tokenizer(target, SimpleNamespace(data=data), tokenizer)  # type: ignore[arg-type]
    return tokenizer


def ids_of_file(folder: Any, text: str, *, is_text: bool = False) -> list[int]:
    return (
        Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text, add_special_tokens=is_text).ids
    )


def read_by_class(folder: Any) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_file(tmp_path, name):
    """transformers 5 splits "1.\\n\\n" by the pattern of another model: the text decodes alike, and
    the model is trained on tokens that it has never seen and is not served with.
    """
    case = CASES[name]()
    folder = write(tmp_path / "source", case)
    tokenizer = export(folder, tmp_path / "export", case.model_type)
    expected = [ids_of_file(folder, text) for text in TEXTS]
    assert [tokenizer.encode(text) for text in TEXTS] == expected
    assert [ids_of_file(tmp_path / "export", text) for text in TEXTS] == expected
    assert (read_by_class(folder) == expected) is (case.rebuilt_as is None)
    assert (read_by_class(tmp_path / "export") == expected) is not case.is_forced
    assert tokenizer.files.rebuilt_as == case.rebuilt_as
    assert ("AutoTokenizer" in tokenizer.note) is (case.rebuilt_as is not None)
    assert ("served" in tokenizer.note) is case.is_forced
    assert tokenizer.encode_passage(Passage("", "one")).ids.tolist() == [
        *ids_of_file(tmp_path / "export", "one", is_text=True),
        tokenizer.eod,
    ]
    is_kept = case.rebuilt_as is None and name != "deepseek"
    for file in ("tokenizer.json", "tokenizer_config.json") if is_kept else ():
        assert (tmp_path / "export" / file).read_bytes() == (
            tmp_path / "source" / file
        ).read_bytes()


def test_the_start_token_that_the_settings_ask_for(tmp_path):
    """transformers 5 drops `add_bos_token` beside a tokenizer.json. The first word of DeepSeek-V3's
    texts was then not trained, and followed nothing.
    """
    folder = write(tmp_path / "source", CASES["deepseek"]())
    tokenizer = export(folder, tmp_path / "export", "deepseek_v3")
    assert tokenizer.encode_passage(Passage("", "one")).ids[0] == tokenizer.tokenizer.bos_token_id
    assert "begins with <|endoftext|>, by add_bos_token" in tokenizer.note
    served = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert served.encode("one") == [0, *ids_of_file(folder, "one")]
    # Once: the exported folder says so twice.
    again = build_hugging_face(str(tmp_path / "export"))
    assert again.encode_passage(Passage("", "one")).ids[:2].tolist() == served.encode("one")[:2]


def test_a_tokenizer_of_another_folder(tmp_path):
    """transformers reads OLMo 2's as its file, and the same files beside a Llama by the class."""
    smollm2 = CASES["smollm2"]()
    folder = write(tmp_path / "source", Case(smollm2.tokenizer, "olmo2", smollm2.settings))
    assert export(folder, tmp_path / "export", "llama").files.rebuilt_as is None
    assert read_by_class(tmp_path / "export") == [ids_of_file(folder, text) for text in TEXTS]


def test_settings_that_transformers_follows(tmp_path):
    """A token that only tokenizer_config.json has, a space before a text, truncation: transformers
    takes the first two and leaves out the third, in each version.
    """
    bpe = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), CHATML)
    bpe.enable_truncation(3)
    bpe.enable_padding(length=50)
    more = {"add_prefix_space": True, "additional_special_tokens": ["<new>"]}
    settings = names("GPT2Tokenizer", END, pad_token="<gone>") | more
    folder = write(tmp_path / "a", Case(bpe, "gpt2", settings))
    tokenizer: Any = build_hugging_face(folder)
    by_class = transformers.AutoTokenizer.from_pretrained(folder)
    text = "one two<new> three <mask>"
    assert tokenizer.encode(text) == by_class.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)[:1])[0] == " "
    assert tokenizer.files.rebuilt_as is None


def test_defaults_of_a_class_are_no_tokens(tmp_path):
    """transformers adds `<mask>` to Gemma's vocabulary: such a text would be refused, as the model
    has no row for it. Checkpoints know the vocabulary by its hash, which keeps the token.
    """
    gemma = sentencepiece(normalizers.Replace(" ", "▁"), None)
    settings = names("GemmaTokenizer", "</s>", **START, pad_token="</s>")
    folder = write(tmp_path / "a", Case(gemma, "gemma2", settings))
    tokenizer: Any = build_hugging_face(folder)
    by_class = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("a <mask>") == ids_of_file(folder, "a <mask>")
    assert max(tokenizer.encode("a <mask>")) < len(tokenizer.tokenizer) < len(by_class)
    assert tokenizer.files.vocabulary == by_class.get_vocab()
    assert tokenizer.vocab_size == len(by_class)
    assert tokenizer.tokenizer.mask_token is None
    assert tokenizer.files.rebuilt_as is None


def test_splits_that_the_vocabulary_hides():
    """Numbers of the probe would show the pattern for digits only if their pairs were tokens."""
    split = [splits(LLAMA3), splits(LLAMA3.replace("{1,3}", ""))]
    one, other = (Tokenizer(models.BPE(unk_token="x", vocab={"x": 0}, merges=[])) for _ in split)
    one.pre_tokenizer, other.pre_tokenizer = split
    assert not encode_alike(one, other, ())
    one.pre_tokenizer = split[1]
    assert encode_alike(one, other, ())


def test_a_tokenizer_larger_than_the_model(tmp_path):
    """Gemma 3 1B as released has one token more than rows: the folder was refused. Taken, an id
    beyond the rows reads another tensor's memory.
    """
    bpe = byte_level(digits(), CHATML)
    whole = json.loads(bpe.to_str())
    last = {"id": 400, "content": "<image>", "special": True, "normalized": False}
    last |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    whole["added_tokens"].append(last)
    whole["model"]["vocab"]["<image>"] = 400  # ids without a token before it, as Phi-4-mini has
    settings = names("PreTrainedTokenizerFast", END)
    folder = write(tmp_path / "a", Case(Tokenizer.from_str(json.dumps(whole)), "olmo2", settings))
    tokenizer: Any = build_hugging_face(folder)
    assert tokenizer.vocab_size == 401 > len(tokenizer.tokenizer)
    assert note_on_rows(tokenizer, 400).startswith("; ids from 400 on have no row in the model")
    assert note_on_rows(tokenizer, 401) == note_on_rows(tokenizer, None) == ""
    encoder = ChatEncoder(tokenizer, 64, "truncate", num_rows=400)
    refused = {"text": "a <image>"}
    with pytest.raises(SampleError, match=r"holds the token <image> with id 400, but .* only 400"):
        encoder.encode(refused)
    with pytest.raises(SampleError, match="holds the token <image>"):
        encoder.encode({"tokens": [1, 400]})
    assert ChatEncoder(tokenizer, 64, "truncate", num_rows=401).encode(refused)
    encoder.check_rows(np.array([399]))
    # Behind the cut it is not trained.
    assert ChatEncoder(tokenizer, 2, "truncate", num_rows=400).encode({"text": "1234 <image>"})
