"""The files beside the weights: what transformers makes of them, and what ends a generation."""

import json
from pathlib import Path

import pytest

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.tokenizer import build_tokenizer
from megatron.sft.model.huggingface.companions import Companions, ends_of_turns
from megatron.sft.options.chat_template import TemplateChoice
from tests.unit_tests.sft.command_line import parse
from tests.unit_tests.sft.data.test_tokenizer import CONVERSATION, MARKED, PLAIN, save_tokenizer
from tests.unit_tests.sft.model.huggingface.test_config import LLAMA, STEPS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

assert save_tokenizer  # a fixture
FROM_NOTHING = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope"
)


def test_byte_level_tokenizer_is_the_same_in_transformers(tmp_path):
    """Otherwise the exported model would be talked to in another language."""
    transformers = pytest.importorskip("transformers")
    ours = build_tokenizer("ByteLevelTokenizer")
    Companions(parse(FROM_NOTHING, base=STEPS), ours, ours.vocab_size, "float32").write(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(256))) + " two  spaces\n\n\tñ 😀 it's\r\n"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    found = theirs.apply_chat_template(
        [message.as_dict() for message in CONVERSATION],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    expected = ours.encode_chat(Conversation(CONVERSATION))
    assert found["input_ids"] == expected.ids.tolist()
    assert found["assistant_masks"] == expected.weights.astype(int).tolist()
    prompt = theirs.apply_chat_template(
        [message._asdict() for message in CONVERSATION[:2]], add_generation_prompt=True
    )
    assert prompt["input_ids"] == expected.ids[: len(prompt["input_ids"])].tolist()
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eod, ours.pad)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.vocab_size) == ("llama", ours.vocab_size)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == [ours.eod, *ends_of_turns(ours)]


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_end_of_turn(save_tokenizer, template):
    """The token behind which a trained assistant falls silent."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(template))
    expected = [] if template is None else [tokenizer.eod]
    assert ends_of_turns(tokenizer) == expected


def test_the_end_of_a_call_is_an_end_of_a_turn(save_tokenizer):
    """Served, a model would go on behind its calls for ever."""
    written = (
        "{{ m.tool_calls[0].function.name ~ '<|im_start|>' if m.tool_calls else "
        "m.content ~ '<|im_end|>' }}"
    )
    calling = MARKED.replace("{{ m.content }}<|im_end|>{% endgen", written + "{% endgen")
    assert calling != MARKED
    tokenizer = build_tokenizer("HuggingFaceTokenizer", save_tokenizer(calling))
    assert ends_of_turns(tokenizer) == [
        tokenizer.encode(token)[0] for token in ("<|im_end|>", "<|im_start|>")
    ]


def test_an_end_of_several_tokens_ends_no_generation(save_tokenizer):
    """Of a template whose tokens the tokenizer lacks: its last character is in other texts, too."""
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", save_tokenizer(PLAIN.replace("<|im_end|>", "<end_of_turn>"))
    )
    assert ends_of_turns(tokenizer) == []


def test_a_template_that_trains_no_end_has_none(save_tokenizer):
    """Then nothing is added to what ends generation."""
    silent = MARKED.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}"
    )
    assert ends_of_turns(build_tokenizer("HuggingFaceTokenizer", save_tokenizer(silent))) == []


def pretrained(folder, save_tokenizer, generation):
    """A folder of a model with its tokenizer, and what is written for it."""
    source = save_tokenizer(PLAIN)
    (folder / "config.json").write_text(
        json.dumps(
            LLAMA
            | {
                "torch_dtype": "bfloat16",
                "_name_or_path": "x",
                "rare": 1,
                "transformers_weights": "mine.safetensors",
            }
        )
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    config = parse(f"{STEPS} --pretrained-checkpoint {folder} --tokenizer-model {source}", base="")
    target = folder / "written"
    target.mkdir()
    tokenizer = build_tokenizer("HuggingFaceTokenizer", source)
    dtype = Companions(config, tokenizer, 300, "float32").write(target)
    return source, target, dtype, *ends_of_turns(tokenizer)


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("generation", "known"),
    [
        ({"eos_token_id": 7, "top_k": 3}, [7]),
        ({"eos_token_id": [7, 8]}, [7, 8]),
        ({}, []),
        (None, []),
    ],
)
def test_what_was_trained_to_end_a_turn_ends_generation(
    tmp_path, save_tokenizer, generation, known
):
    """Of a base model it does not: generation would go on for ever."""
    _, target, dtype, end = pretrained(tmp_path, save_tokenizer, generation)
    written = read(target / "generation_config.json")
    assert written == {**(generation or {}), "eos_token_id": [*known, end]}
    assert dtype == "bfloat16"


def test_files_of_the_source_are_kept(tmp_path, save_tokenizer):
    """Also keys of config.json that nobody here knows."""
    (end,) = ends_of_turns(build_tokenizer("HuggingFaceTokenizer", save_tokenizer(PLAIN)))
    source, target, *_ = pretrained(
        tmp_path, save_tokenizer, {"eos_token_id": [end], "pad_token_id": 4}
    )
    assert read(target / "config.json") == LLAMA | {"torch_dtype": "bfloat16", "rare": 1}
    assert read(target / "generation_config.json") == {"eos_token_id": [end], "pad_token_id": 4}

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (Path(source) / name).read_bytes()


HUGE = 1000000000000000019884624838656
"""What transformers writes as `model_max_length` where no limit is known."""
OTHER = PLAIN.replace("assistant\n", "assistant:\n")


@pytest.mark.parametrize(
    "held",
    [PLAIN, [{"name": "default", "template": PLAIN}, {"name": "rag", "template": "r"}], None],
)
def test_the_template_that_was_trained_with_is_the_one_that_is_found(
    tmp_path, save_tokenizer, held
):
    """chat_template.jinja wins over tokenizer_config.json; a model would be asked in another form
    than trained.
    """
    transformers = pytest.importorskip("transformers")
    source = Path(
        save_tokenizer(held, model_max_length=HUGE, sp_model_kwargs={}, added=[{"a": None}])
    )
    (source / "chat_template.jinja").write_text(PLAIN)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("t")
    (tmp_path / "other.jinja").write_text(OTHER)
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", str(source), template=TemplateChoice(str(tmp_path / "other.jinja"))
    )
    config = parse(
        f"{FROM_NOTHING} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {source}",
        base=STEPS,
    )
    target = tmp_path / "target"
    target.mkdir()
    Companions(config, tokenizer, tokenizer.vocab_size, "float32").write(target)
    found = transformers.AutoTokenizer.from_pretrained(target)
    assert found.get_chat_template() == OTHER
    # Conversations with tools were trained by it, too.
    assert found.get_chat_template(tools=[{}]) == OTHER
    written, before = read(target / "tokenizer_config.json"), read(source / "tokenizer_config.json")
    assert written.pop("chat_template", None) == (held and OTHER)
    assert written == {name: value for name, value in before.items() if name != "chat_template"}
    assert str(HUGE) in (target / "tokenizer_config.json").read_text()


def test_a_processor_is_served_with_the_trained_template(tmp_path, save_tokenizer):
    """Without its files transformers loads no processor of an exported Gemma 3; and a processor
    reads templates in places of its own, one of which conflicts with several templates.
    """
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")
    source = Path(
        save_tokenizer(
            [{"name": "default", "template": OTHER}, {"name": "tool_use", "template": PLAIN}],
            processor_class="Gemma3Processor",
            extra_special_tokens={"image_token": "<i>", "boi_token": "<b>", "eoi_token": "<e>"},
        )
    )
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_resize": False,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 7},
        "chat_template.json": {"chat_template": PLAIN},
        "video_preprocessor_config.json": {},
        "modeling_own.py": {},
        "vocab.model": {},
        "training_args.bin": {},
    }
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    _, target, *_ = pretrained(source, lambda _: str(source), None)
    assert {path.name for path in target.iterdir()} & files.keys() == files.keys() - {
        "chat_template.json",
        "training_args.bin",
    }
    for kind in (transformers.AutoTokenizer, transformers.AutoProcessor):
        loaded = kind.from_pretrained(target)
        assert loaded.chat_template == {"default": OTHER, "tool_use": PLAIN}
    assert (type(loaded).__name__, loaded.image_seq_length) == ("Gemma3Processor", 7)
