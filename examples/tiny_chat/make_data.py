"""pure. Chat data made on the spot from the documentation of Python's own standard library.

    python examples/tiny_chat/make_data.py --output-dir data/tiny_chat

One sample per documented public module, class, function and method: a question, and its docstring
as the answer. The lengths are those of real documentation, so heavy-tailed. Every choice (phrase,
split, order) is a hash of the object's
name: two runs on one Python write identical bytes, and another release of Python changes little
more than its own news.

Nothing is downloaded, nothing but the standard library is imported, nothing of the user's
environment gets in.
"""

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, NoneType
from typing import NamedTuple

# Some act when imported (a browser opens, a poem is printed, a window system is asked for); some
# are tests, or hold no documentation. `genericpath`, `ntpath` and `posixpath` come as `os.path`,
# the name that people know.
SKIPPED_MODULES = {
    *(
        "antigravity",
        "distutils",
        "encodings",
        "ensurepip",
        "genericpath",
        "idlelib",
        "lib2to3",
        "msilib",
        "ntpath",
    ),
    *("posixpath", "pydoc_data", "test", "tests", "this", "tkinter", "turtle", "turtledemo"),
}

QUESTIONS = {
    "module": (
        "What is the module `{}` for?",
        "Give me an overview of the module `{}`.",
        "When would I import `{}`?",
        "What can I do with Python's `{}` module?",
    ),
    "class": (
        "Explain the class `{}`.",
        "What is a `{}`?",
        "When do I need the class `{}`?",
        "How do I use the class `{}`?",
        "Describe `{}` for me, please.",
    ),
    "function": (
        "What does `{}` do?",
        "How do I use `{}`?",
        "Explain the function `{}`.",
        "What is `{}` good for?",
        "I found a call of `{}` in some code. What is it?",
        "How do I call `{}`, and what happens then?",
    ),
    "method": (
        "What does the method `{}` do?",
        "How do I use `{}`?",
        "Explain `{}` to me.",
        "What happens when I call `{}`?",
        "Tell me about the method `{}`.",
    ),
}

SOURCES = {"overviews": ("module", "class"), "calls": ("function", "method")}
"""File of a part of the training data -> the kinds in it."""

HELD_OUT_ONE_IN = 20
LENGTH_QUANTILES = (
    ("5 %", 0.05),
    ("median", 0.5),
    ("95 %", 0.95),
    ("99 %", 0.99),
    ("longest", 1.0),
)


class Documented(NamedTuple):
    """One public object that has a docstring."""

    kind: str
    """A key of `QUESTIONS`."""
    name: str
    """What a user would type: `json.JSONDecoder.decode`."""
    signature: str
    """`json.JSONDecoder.decode(self, s, ...)`; empty where Python knows none."""
    docstring: str
    """Without its indentation."""

    @property
    def is_held_out(self) -> bool:
        """By the name's first part, `json`: what is held out has no near-duplicate beside it in the
        training data.
        """
        return digest(f"held out {self.name.partition('.')[0]}") % HELD_OUT_ONE_IN == 0


class Split(NamedTuple):
    """The two halves of the data, each in its final order."""

    train: list[Documented]
    valid: list[Documented]


def digest(text: str) -> int:
    """A number that depends on the text only (`hash` differs from process to process)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def standard_modules() -> list[str]:
    """Names of the standard library's public top-level modules, and `os.path`, sorted."""
    return sorted({*sys.stdlib_module_names, "os.path"})


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hides what modules print and warn about (many are deprecated) while they are imported and
    looked at.
    """
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def walk_modules(names: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    """Imports the modules and their submodules in order, leaving out private ones and those this
    platform lacks.
    """
    for name in names:
        last = name.rpartition(".")[2]
        if last.startswith("_") or last in SKIPPED_MODULES:
            continue
        try:
            module = importlib.import_module(name)
        except (
            Exception
        ):  # whatever a module for another platform raises, it has no documentation here
            continue
        yield name, module
        submodules = sorted(
            found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))
        )
        yield from walk_modules(f"{name}.{submodule}" for submodule in submodules)


def public_members(name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    """What the module offers as its own: `__all__`, or else the public names that it did not import
    from another.
    """
    exported = getattr(module, "__all__", None)
    for member in sorted(exported if exported is not None else vars(module)):
        value = getattr(module, member, None)
        # `_functools.partial` belongs to `functools`, `asyncio.events.Handle` to `asyncio`.
        origin = str(getattr(value, "__module__", "")).lstrip("_").partition(".")[0]
        if not member.startswith("_") and (
            exported is not None or origin == name.partition(".")[0]
        ):
            yield member, value


class Elided:
    """A default that isn't shown: `f(timeout=...)`."""

    def __repr__(self) -> str:
        return "..."


def is_shown(default: object) -> bool:
    """Whether the text of a default is a plain constant: the same in every run and for every user.

    `<object at 0x7f8e>` is not; nor are `cgi.parse(environ=os.environ)` and
    `platform.architecture(sys.executable)`.
    """
    if isinstance(default, str):
        return not os.path.isabs(default)
    return isinstance(
        default, (NoneType, bool, int, float, bytes, type)
    )  # `Parameter.empty` is a type


def signature_of(name: str, value: object) -> str:
    """The line to call `name` by; empty if there is none, as for modules and for many functions
    written in C.
    """
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    # ValueError where there is none, but `curses` shows that anything may come of parsing C's text
    except Exception:
        return ""
    parameters = [
        parameter if is_shown(parameter.default) else parameter.replace(default=Elided())
        for parameter in signature.parameters.values()
    ]
    return f"{name}{signature.replace(parameters=parameters)}"


def describe(kind: str, name: str, value: object) -> Documented | None:
    """The sample of one object; None without a docstring of its own."""
    docstring = getattr(value, "__doc__", None)
    if not isinstance(docstring, str) or not docstring.strip():
        return None
    name = name.removeprefix("builtins.")
    return Documented(kind, name, signature_of(name, value), inspect.cleandoc(docstring).strip())


def documented_objects(name: str, module: ModuleType) -> Iterator[Documented | None]:
    """The module itself, its functions, its classes and their methods."""
    yield describe("module", name, module)
    for member, value in public_members(name, module):
        path = f"{name}.{member}"
        if inspect.isclass(value):
            yield describe("class", path, value)
            for method, attribute in sorted(vars(value).items()):
                function = getattr(
                    attribute, "__func__", attribute
                )  # inside classmethod and staticmethod
                if not method.startswith("_") and inspect.isroutine(function):
                    yield describe("method", f"{path}.{method}", function)
        elif inspect.isroutine(value):
            yield describe("function", path, value)


def build(module_names: Iterable[str]) -> Split:
    """Documents the modules and splits them: each docstring once, under the first name that it is
    met with.
    """
    samples: dict[str, Documented] = {}
    with silenced():
        for name, module in walk_modules(module_names):
            for sample in documented_objects(name, module):
                if sample is not None:
                    samples.setdefault(sample.docstring, sample)
    split = Split(train=[], valid=[])
    for sample in sorted(samples.values(), key=lambda sample: (digest(sample.name), sample.name)):
        (split.valid if sample.is_held_out else split.train).append(sample)
    return split


def messages(sample: Documented) -> list[dict[str, str]]:
    """The sample as a chat of two turns."""
    phrases = QUESTIONS[sample.kind]
    question = phrases[digest(f"phrase {sample.name}") % len(phrases)].format(sample.name)
    answer = f"`{sample.signature}`\n\n{sample.docstring}" if sample.signature else sample.docstring
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_jsonl(path: Path, chats: Iterable[list[dict[str, str]]]) -> None:
    """One `{"messages": [...]}` per line. The file appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
    temporary.replace(path)


def write(split: Split, output_dir: Path) -> str:
    """Writes `train.jsonl`, its two parts, and `valid.jsonl`, and gives the line that says what
    they hold.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    train, valid = (
        [messages(sample) for sample in split.train],
        [messages(sample) for sample in split.valid],
    )
    write_jsonl(output_dir / "train.jsonl", train)
    write_jsonl(output_dir / "valid.jsonl", valid)
    for (
        name,
        kinds,
    ) in SOURCES.items():  # the training data again, in two parts: what blend.yaml mixes
        write_jsonl(
            output_dir / f"{name}.jsonl",
            [messages(sample) for sample in split.train if sample.kind in kinds],
        )
    lengths = sorted(sum(len(turn["content"].encode()) for turn in chat) for chat in train + valid)
    quantiles = ", ".join(
        f"{label} {lengths[round(at * (len(lengths) - 1))]:,}" for label, at in LENGTH_QUANTILES
    )
    return (
        f"{output_dir}: {len(train):,} training and {len(valid):,} held-out chats, "
        f"{sum(lengths):,} bytes of text; bytes per chat: {quantiles}"
    )


def main() -> None:
    """Reads the command line, writes the data, prints one line."""
    parser = argparse.ArgumentParser(
        description="Builds chat data from the documentation of Python's standard library."
    )
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="folder for train.jsonl and valid.jsonl"
    )
    output_dir = parser.parse_args().output_dir
    print(write(build(standard_modules()), output_dir))


if __name__ == "__main__":
    main()
