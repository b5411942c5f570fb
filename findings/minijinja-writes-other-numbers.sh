#!/usr/bin/env bash
# minijinja 3.1.0 beside Jinja2 3.1.6: chat templates write other text for numbers, quotes and lines.
#
# Guess: a server in Rust, whose engine is minijinja, writes a chat template's prompts character by
#   character as transformers does, or refuses the template.
# Seen: it renders all, and a call's arguments become other text: 1e-05 is 0.00001 (by tojson, too),
#   1e+22 has all its digits, a whole number of 41 digits becomes a float, and the built-in tojson
#   writes "it's" as it\u0027s. splitlines knows only \n and \r\n; trim leaves \x1f; a text is no
#   sequence. Plain chats of released templates are the same, or raise (Nemotron 3, LFM 2.5).
# Here: templates are rendered as transformers renders them, by Jinja2 with JSON of its own. Whoever
#   serves with another engine compares prompts first (docs/reference/surprises.md).
set -euo pipefail
pins=(minijinja==3.1.0 jinja2==3.1.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
cat >"$scratch/minijinja_numbers.py" <<'PYTHON'
import json

import jinja2
import minijinja

theirs = jinja2.Environment()
theirs.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers
rust = minijinja.Environment()


def both(source, x):
    return theirs.from_string(source).render(x=x), rust.render_str(source, "template.txt", x=x)


seen = {
    ("{{ x }}", 1e-5): ("1e-05", "0.00001"),
    ("{{ x|tojson }}", 1e-5): ("1e-05", "0.00001"),
    ("{{ x|tojson }}", 1e-7): ("1e-07", "1e-7"),
    ("{{ x }}", 1e22): ("1e+22", "1" + "0" * 22 + ".0"),
    ("{{ x }}", 10**40): ("1" + "0" * 40, "1" + "0" * 40 + ".0"),
    ("{{ x|tojson }}", 10**40): ("1" + "0" * 40, "1e+40"),
    ("{{ x|tojson }}", "it's"): ('"it\'s"', '"it\\u0027s"'),
    ("{{ x.splitlines()|length }}", "a\rb\x0cc"): ("3", "1"),
    ("{{ x|trim }}", "a\x1f"): ("a", "a\x1f"),
    ("{{ x is sequence }}", "text"): ("True", "False"),
}
for (source, x), expected in seen.items():
    found = both(source, x)
    print(source, repr(x)[:24], *map(repr, found))
    assert tuple(one.lower() for one in found) == tuple(one.lower() for one in expected), expected
for x in ("é 你", 3, 1.5, True, None, [1.0, "a"], {"b": 1, "a": 2}):
    assert len(set(both("{{ x|tojson }}", x))) == 1, x
PYTHON
"$environment/bin/python" "$scratch/minijinja_numbers.py"
