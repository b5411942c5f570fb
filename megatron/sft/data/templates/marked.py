"""pure. A Jinja template that tells where each message's turn stands in what it writes.

Calls are put into its syntax tree: they write nothing, and note how many characters were written
when they were reached, at the beginning of each pass of a loop, after each loop, and around what {%
generation %} encloses. So one rendering tells all places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from megatron.sft.data.templates.sandbox import (
    MAX_CHARACTERS,
    EndlessTemplateError,
    Sandbox,
    check_private_names,
)

_MARK = "mark_place"
_MAX_PASSES = 1_000_000
"""Rounds of all loops of a rendering, at most."""


class Written(NamedTuple):
    """A rendering with all its marks."""

    text: str
    turns: Mapping[int, Sequence[tuple[int, int]]]
    """Number of a message -> where the loop was at it, [start, end), those that wrote nothing left
    out.
    """
    generated: Sequence[tuple[int, int, int | None]]
    """Span that {% generation %} encloses, and the message that it is in."""
    loop_end: int
    """End of the last loop over messages ended; 0 if there was none."""


class MarkedTemplate:
    """A template with marks; `write` renders it."""

    def __init__(self, source: str) -> None:
        """TemplateError where `source` is no template, or uses names that lead out of a sandbox."""
        self._sandbox = environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        tree = environment.parse(source)
        check_private_names(tree)
        self._compiled = environment.from_string(
            _MarkTurns().visit(tree).set_environment(environment)
        )

    def write(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> Written:
        """Renders `messages`; TemplateError where the template refuses them."""
        marks = _Marks(messages, self._sandbox.check_time)
        self._sandbox.begin()
        for part in self._compiled.generate(
            {**variables, "messages": messages, _MARK: marks.reach}
        ):
            marks.write(part)
        return marks.written()


class _Place(NamedTuple):
    """A mark that the template reached: where in the text, in which loop, at which message (None:
    at none).
    """

    position: int
    loop: int
    message: int | None


class _Marks:
    """Text of a rendering, and the places at which its marks were reached."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], check_time: Callable[[], None]
    ) -> None:
        self._check_time = check_time
        self._number_of = {id(message): number for number, message in enumerate(messages)}
        self._parts: list[str] = []
        self._length = self._num_reached = 0
        self._places: list[_Place] = []
        self._message: int | None = None
        self._opened: list[tuple[int, int | None]] = []
        self._generated: list[tuple[int, int, int | None]] = []

    def write(self, part: str) -> None:
        self._parts.append(part)
        self._length += len(part)
        if self._length > MAX_CHARACTERS:
            raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")

    def reach(self, kind: str, loop: int = 0, item: object = None) -> str:
        """Marks a place, called from the template; returns what it writes, which is nothing."""
        self._num_reached += 1
        if self._num_reached > _MAX_PASSES:
            raise EndlessTemplateError("it never ends")
        self._check_time()
        if kind == "turn":
            message = self._number_of.get(id(item))
            self._places.append(_Place(self._length, loop, message))
            self._message = self._message if message is None else message
        elif kind == "generation":
            self._opened.append((self._length, self._message))
        elif kind == "end":
            start, message = self._opened.pop()
            self._generated.append((start, self._length, message))
        return ""

    def written(self) -> Written:
        turns: dict[int, list[tuple[int, int]]] = {}
        last: dict[int, _Place] = {}
        loop_end = 0
        for place in self._places:
            before = last.get(place.loop)
            if before is not None and before.message is not None:
                loop_end = place.position
                if place.position > before.position:
                    turns.setdefault(before.message, []).append((before.position, place.position))
            last[place.loop] = place
        return Written("".join(self._parts), turns, self._generated, loop_end)


class _MarkTurns(NodeTransformer):
    """Puts a mark at the beginning of each loop's body, and after each loop; and has joined texts
    counted.
    """

    def __init__(self) -> None:
        self._num_loops = 0

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            node.body.insert(0, _mark("pass"))
            return node
        self._num_loops += 1
        number = nodes.Const(self._num_loops)
        node.body.insert(0, _mark("turn", number, _item_of(node)))
        return [node, _mark("turn", number, nodes.Const(None))]

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)


def _item_of(loop: nodes.For) -> nodes.Expr:
    """Returns what a loop is at: `m` of {% for m in messages %}, and `messages[i]` of {% for i in
    range(messages | length) %}, as EXAONE 4 goes through them.
    """
    target = loop.target.name  # type: ignore[attr-defined]
    counted = {name.name for name in loop.iter.find_all(nodes.Name)} - {"range"}
    for item in (found for part in loop.body for found in part.find_all(nodes.Getitem)):
        of, at = item.node, item.arg
        if (
            isinstance(of, nodes.Name)
            and of.name in counted
            and isinstance(at, nodes.Name)
            and at.name == target
        ):
            return nodes.Getitem(nodes.Name(of.name, "load"), nodes.Name(target, "load"), "load")
    return nodes.Name(target, "load")


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, as transformers has it: a mark at its beginning and
    one at its end.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [
            _mark("generation").set_lineno(line),
            nodes.Scope(body),
            _mark("end").set_lineno(line),
        ]


def _mark(kind: str, *arguments: nodes.Expr) -> nodes.Output:
    return nodes.Output(
        [nodes.Call(nodes.Name(_MARK, "load"), [nodes.Const(kind), *arguments], [], None, None)]
    )
