"""pure. Names of the HuggingFace hub where a path is needed: answered with the line that downloads
what they name. Nothing is downloaded here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from megatron.blending.formats.sources import SOURCES
from megatron.packing.flags import flag_of

_MODELS = ("pretrained_checkpoint", "tokenizer_model", "lora_adapter")
_DATA = ("data_path", "valid_data_path", "sample_prompts")
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB = re.compile(
    r"(?P<address>hf://|https?://(?:huggingface\.co|hf\.co)/)?(?P<kind>datasets/|models/)?"
    rf"(?P<repository>{_NAME}/(?P<name>{_NAME}))(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?:tree|blob|resolve)/(?P<branch>[\w.-]+))?(?:/(?P<file>.*))?"
)


def check_hub_names(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a path option that has a name of the hub.

    given: options of the user, by field name.
    """
    for name in (*_MODELS, *_DATA):
        value = given.get(name)
        for path in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(path, str):
                check_hub_name(path, f"{flag_of(name)} ", is_data=name in _DATA)


def check_hub_name(path: str, where: str = "", *, is_data: bool | None = None) -> None:
    """Raises ValueError if a path exists nowhere and reads like a name of the hub.

    where: the flag that has it and a space, for the message. is_data: whether records are expected,
    or None for models and records alike.

    `Qwen/Qwen3-8B -> "...: no such folder; if it is on the hub, download it, `hf download
    Qwen/Qwen3-8B --local-dir Qwen3-8B`, and pass Qwen3-8B"`
    """
    parts = _HUB.fullmatch(path)
    if parts is None or os.path.exists(path) or _is_local(parts, path, is_data is not False):
        return
    # What has no address may also be a folder whose name is wrong.
    kind = "folder" if is_data is False else "file or folder"
    fault = "is on the hub" if parts["address"] else f"no such {kind}; if it is on the hub"
    raise ValueError(f"{where}{path}: {fault}, {_advice(parts, is_data)}")


def download_advice(path: str) -> str:
    """Returns the way out for data of the hub that could not be read by its address; empty for
    another path.
    """
    parts = _HUB.fullmatch(path)
    return f"; {_advice(parts, True)}" if parts is not None and parts["address"] else ""


def _advice(parts: re.Match[str], is_data: bool | None) -> str:
    folder, file = parts["name"], parts["file"] or ""
    revision = parts["revision"] or parts["branch"]
    is_dataset = parts["kind"] == "datasets/" or (is_data and parts["kind"] is None)
    words = (
        "hf download",
        parts["repository"],
        file,
        "--repo-type dataset" if is_dataset else "",
        "" if revision in (None, "main") else f"--revision {revision}",
        f"--local-dir {folder}",
    )
    either = " (data: with --repo-type dataset)" if is_data is None and not is_dataset else ""
    line = " ".join(filter(None, words))
    return f"download it, `{line}`{either}, and pass {os.path.join(folder, file).rstrip('/')}"


def _is_local(parts: re.Match[str], path: str, may_be_data: bool) -> bool:
    """Returns whether a path that does not exist is not of the hub: a wrong name in a folder that
    is there, a file's name, or a URL whose file is read as it is.
    """
    is_file = os.path.splitext(path)[1] in SOURCES
    if parts["address"]:
        return is_file and may_be_data
    return is_file or parts["file"] is not None or os.path.isdir(path.split("/", 1)[0])
