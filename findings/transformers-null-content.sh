#!/usr/bin/env bash
# transformers 5.24.0: keys that are null are taken out of messages before a template sees them.
#
# Guess: apply_chat_template gives a template the messages as they are, so that a content of null,
#   which OpenAI's API has beside tool calls, is null in the template.
# Seen: keys whose value is null are taken out of each message. A template that tests
#   `message['content'] is none` (DeepSeek-V3 and R1 as released) finds the content undefined, takes
#   the branch for text, and leaves the call out. With content "" it leaves the call out as well.
# Here: megatron/sft/data/templates/probes.py finds out once per template whether null, no key or ""
#   renders a call whole, and renders without transformers.
set -euo pipefail
pins=(transformers==5.24.0 jinja2==3.1.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
cd "$scratch"
HF_HUB_OFFLINE=1 "$environment/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
tokenizer.chat_template = (
    "{% for m in messages %}{% if m['content'] is none %}"
    "{% for call in m['tool_calls'] %}<call>{{ call['function']['name'] }}{% endfor %}"
    "{% else %}<text>{{ m['content'] }}{% endif %}{% endfor %}"
)
calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
rendered = {}
for content in (None, ""):
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    rendered[content] = tokenizer.apply_chat_template([message], tokenize=False)
    print(f"content {content!r}: {rendered[content]!r}")
assert rendered == {None: "<text>", "": "<text>"}, "the call is rendered: otherwise than stated"
PYTHON
