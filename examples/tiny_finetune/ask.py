"""pure. Asks a HuggingFace folder held-out questions through transformers, and counts the right
answers.

python examples/tiny_finetune/ask.py runs/tiny_finetune/chat data/tiny_finetune/held_out.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

NUM_SHOWN = 5
MAX_TOKENS = 20


def answers(
    folder: Path, questions: list[dict[str, str]], max_tokens: int = MAX_TOKENS
) -> list[str]:
    """What the model of the folder says to each, one word after the other the most likely one."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = library.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    said = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)[0]
        said.append(
            tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return said


def main() -> None:
    """Reads the command line; prints some questions, what was said, and how much of it was
    right."""
    parser = argparse.ArgumentParser(description="Asks a HuggingFace folder held-out questions.")
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("questions", type=Path, help="held_out.jsonl, as make_data.py writes it")
    arguments = parser.parse_args()
    chats = [
        json.loads(line)["messages"]
        for line in arguments.questions.read_text(encoding="utf-8").splitlines()
    ]
    said = answers(arguments.folder, [question for question, _ in chats])
    rights = [answer == wanted["content"] for answer, (_, wanted) in zip(said, chats, strict=True)]
    print(f"{arguments.folder}, asked about pairs that no text and no chat had:")
    for (question, _), answer, is_right in list(zip(chats, said, rights))[
        :: -(-len(chats) // NUM_SHOWN)
    ]:
        print(f"  {question['content']}   {answer.strip():.40}{'' if is_right else '   (wrong)'}")
    print(f"  {sum(rights)} of {len(rights)} answers are right")


if __name__ == "__main__":
    main()
