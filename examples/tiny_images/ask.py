r"""pure. Asks a vision model held-out questions through transformers, and counts the right answers.

python examples/tiny_images/ask.py data/tiny_images/model runs/tiny_images/chat \
    --questions data/tiny_images/held_out.jsonl --html runs/tiny_images/answers.html
"""

import argparse
import base64
import html
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


def page(questions: list[dict[str, str]], columns: dict[str, list[str]], pictures: Path) -> str:
    """Returns a page of HTML with each picture, its question, and what each model says."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = []
    for number, asked in enumerate(questions):
        path = pictures / asked["image"]
        kind = "png" if path.suffix == ".png" else "jpeg"
        data = base64.b64encode(path.read_bytes()).decode()
        cells = ""
        for said in columns.values():
            colour = "#d9f2d9" if is_right(said[number], asked) else "#f7d9d9"
            cells += f'<td style="background:{colour}">{html.escape(said[number].strip())}</td>'
        rows.append(
            f'<tr><td><img src="data:image/{kind};base64,{data}"></td>'
            f"<td>{html.escape(asked['question'])}</td>{cells}</tr>"
        )
    return (
        "<!doctype html><meta charset=utf-8><title>Held-out pictures</title>"
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:.4em 1em;text-align:left}"
        "</style><h1>Questions about pictures that no chat had</h1>"
        f"<table><tr><th>picture</th><th>question</th>{heads}</tr>{''.join(rows)}</table>\n"
    )


def is_right(said: str, asked: dict[str, str]) -> bool:
    """Returns whether an answer has the words of the right one."""
    return said.split() == asked["answer"].split()


def main() -> None:
    """Reads the command line; prints some questions, what was said, and how much of it was
    right.
    """
    parser = argparse.ArgumentParser(description="Asks vision models held-out questions.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of models")
    parser.add_argument("--questions", type=Path, required=True, help="made by make_data.py")
    parser.add_argument("--html", type=Path, help="file for a page with all pictures and answers")
    arguments = parser.parse_args()
    lines = arguments.questions.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    pictures = arguments.questions.parent
    columns = {}
    for folder in arguments.folders:
        said = columns[str(folder)] = answers(folder, questions, pictures)
        print(f"{folder}, asked about pictures that no chat had:")
        for asked, answer in list(zip(questions, said))[:: -(-len(questions) // NUM_SHOWN)]:
            wrong = "" if is_right(answer, asked) else f"   (wrong: {asked['answer']})"
            print(f"  {asked['image']}: {asked['question']}   {answer.strip():.40}{wrong}")
        num_right = sum(map(is_right, said, questions))
        print(f"  {num_right} of {len(questions)} answers are right")
    if arguments.html is not None:
        arguments.html.write_text(page(questions, columns, pictures), encoding="utf-8")
        print(f"pictures and answers: {arguments.html}")


if __name__ == "__main__":
    main()
