#!/usr/bin/env bash
# SGLang 0.5.23: a chat template with the letters "vision", as in "provisional", is one of images.
#
# Guess: how a template wants content (text, or a list of parts) is told from what it does with it; and
#   a loop over a variable that was set to message.content is a loop over parts.
# Seen: a template of text that has "image", "audio", "video" or "vision" anywhere, in a word of its
#   system prompt or a comment, gets requests with parts as lists, and the model reads
#   [{'type': 'text', 'text': 'hello'}]. A template that loops over a variable gets text instead of
#   parts, and writes an empty turn.
# Here: chat_template.jinja is written as it came. Write templates that
#   take both (`content is string`), and loop over message.content.
set -euo pipefail
pins=(jinja2==3.1.6 transformers==5.24.0 torch==2.13.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
if [ ! -e "$environment/sglang" ]; then
    "$environment/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$scratch" sglang==0.5.23
    "$environment/bin/python" -m zipfile -e "$scratch"/sglang-*.whl "$environment/sglang"
fi
source=$environment/sglang/sglang/srt
export SGLANG_SOURCE=$source
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/sglang_templates_with_vision.py" <<'PYTHON'
import importlib.util
import os
import sys
import types
from pathlib import Path

import jinja2

# Three names of media, that text does not come to.
for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
    sys.modules[name] = types.ModuleType(name)
media = sys.modules["sglang.srt.utils"]
media.GLM_MEDIA_CONFIG_KEYS, media.ImageData, media.VideoData = (), dict, dict
path = Path(os.environ["SGLANG_SOURCE"]) / "parser/jinja_template_utils.py"
spec = importlib.util.spec_from_file_location("jinja_template_utils", path)
templates = importlib.util.module_from_spec(spec)
spec.loader.exec_module(templates)

PLAIN = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
CASES = {
    "plain": PLAIN,
    "with a word": "Answers are provisional." + PLAIN,
    "by a variable": "{% for message in messages %}<|{{ message.role }}|>{% set parts = message.content %}"
    "{% for part in parts %}{{ part.text }}{% endfor %}{% endfor %}",
}
parts = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
seen = {}
for name, template in CASES.items():
    form = templates.detect_jinja_template_content_format(template)
    message = templates.process_content_for_template_format(parts, form, [], [], [], [])
    seen[name] = form, jinja2.Template(template).render(messages=[message])
    print(name, seen[name])
assert seen["plain"] == ("string", "<|user|>hello")
word = "Answers are provisional.<|user|>[{'type': 'text', 'text': 'hello'}]"
assert seen["with a word"] == ("openai", word)
assert seen["by a variable"] == ("string", "<|user|>")
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore sglang_templates_with_vision.py
