"""pure. Asks a vision model held-out questions through transformers, and counts the right answers.

python examples/tiny_images/ask.py runs/tiny_images/chat data/tiny_images/held_out.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

NUM_SHOWN = 4
MAX_TOKENS = 8


def answers(folder: Path, questions: list[dict[str, str]], pictures: Path) -> list[str]:
    """What the model says to each, one word after the other the most likely one."""
    import transformers
    from PIL import Image

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    processor = library.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = library.AutoModelForImageTextToText.from_pretrained(folder)
    placeholder = tokenizer.decode([model.config.image_token_id])
    said = []
    for question in questions:
        with Image.open(pictures / question["image"]) as image:
            made = processor(images=[image], return_tensors="pt")
        text = tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": question["question"]}],
                }
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        count = int(made["image_grid_thw"].prod()) // processor.merge_size**2
        prompt = tokenizer(text.replace(placeholder, placeholder * count), return_tensors="pt")
        prompt["mm_token_type_ids"] = (prompt["input_ids"] == model.config.image_token_id).int()
        tokens = model.generate(**prompt, **made, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        said.append(
            tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return said


def main() -> None:
    """Reads the command line; prints some questions, what was said, and how much of it was
    right.
    """
    parser = argparse.ArgumentParser(description="Asks a vision model held-out questions.")
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("questions", type=Path, help="held_out.jsonl, as make_data.py writes it")
    arguments = parser.parse_args()
    lines = arguments.questions.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    said = answers(arguments.folder, questions, arguments.questions.parent)
    rights = [one.split() == asked["answer"].split() for one, asked in zip(said, questions)]
    print(f"{arguments.folder}, asked about pictures that no chat had:")
    for asked, answer, is_right in list(zip(questions, said, rights))[
        :: -(-len(questions) // NUM_SHOWN)
    ]:
        wrong = "" if is_right else f"   (wrong: {asked['answer']})"
        print(f"  {asked['image']}: {asked['question']}   {answer.strip():.40}{wrong}")
    print(f"  {sum(rights)} of {len(rights)} answers are right")


if __name__ == "__main__":
    main()
