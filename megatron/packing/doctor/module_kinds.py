"""pure. The kind of a module, from its name and class."""

from __future__ import annotations

import re

KINDS = (
    (
        "experts",
        re.compile(r"experts|router|sparse_?(mlp|moe)|moe_?(block|mlp|layer|ffn)?$", re.IGNORECASE),
    ),
    (
        "recurrence",
        re.compile(
            r"linear_?att|delta|mamba|mixer|ssm|ssd|rwkv|lstm|retention|recurrent|rg_?lru"
            r"|lightning|hgrn|time_?mix",
            re.IGNORECASE,
        ),
    ),
    ("convolution", re.compile(r"conv|shift", re.IGNORECASE)),
    ("attention", re.compile(r"att(n|ention)|mla", re.IGNORECASE)),
    ("norm", re.compile(r"norm", re.IGNORECASE)),
)
"""Kind -> what its names look like, the first that fits."""


def kind_of(name: str, class_name: str) -> str:
    """Returns the kind of a module, by its class before its name; "" if neither tells.

    Only the last part of the name counts: `layers.0.linear_attn.norm` is a norm.
    """
    for text in (class_name, name.rpartition(".")[2]):
        for kind, pattern in KINDS:
            if pattern.search(text):
                return kind
    return ""
