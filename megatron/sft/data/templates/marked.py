"""pure. Renders a Jinja template, and records the place of each message in the text.

Calls of a function are inserted into the template's syntax tree: at the start of each loop pass,
after each loop, and at both ends of {% generation %}. The function writes nothing. It records how
many characters were written so far, and the message that the loop is at. A single rendering thus
gives all places:

    {% for m in messages %}{{ MARK(m) }}<{{ m.role }}>{{ m.content }}{% endfor %}{{ MARK(none) }}
    "<user>hi<assistant>yo": marks at 0 (message 0), 8 (message 1), 21: turns [0, 8) and [8, 21)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from megatron.sft.data.templates.sandbox import (
    LIMITS,
    EndlessTemplateError,
    Limits,
    Sandbox,
    check_private_names,
)

_MARK = "mark_place"


class Written(NamedTuple):
    """A rendering with all its marks."""

    text: str
    turns: Mapping[int, Sequence[tuple[int, int]]]
    """Number of a message -> spans [start, end) that the loop wrote while it was at this message.
    Empty spans are left out.
    """
    generated: Sequence[tuple[int, int, int | None]]
    """(start, end, number of the message) of each {% generation %}; None outside of messages."""
    loop_end: int
    """End of the last loop over messages; 0 if there was none."""


class MarkedTemplate:
    """A template with marks; `write` renders it."""

    def __init__(self, source: str, limits: Limits = LIMITS) -> None:
        """Compiles the template. Raises TemplateError if it is not valid, or uses private names."""
        self._sandbox = environment = Sandbox(
            limits, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        with environment.time_limit():  # constants are computed here already
            tree = environment.parse(source)
            check_private_names(tree)
            self._compiled = environment.from_string(
                _MarkTurns().visit(tree).set_environment(environment)
            )

    def write(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> Written:
        """Renders `messages`. Raises TemplateError if the template refuses them."""
        marks = _Marks(messages, self._sandbox.check_time, self._sandbox.limits)
        self._sandbox.begin()
        with self._sandbox.time_limit():
            for part in self._compiled.generate(
                {**variables, "messages": messages, _MARK: marks.reach}
            ):
                marks.write(part)
        return marks.written()


class _Place(NamedTuple):
    """A recorded mark: position in the text, number of the loop, number of the message or None."""

    position: int
    loop: int
    message: int | None


class _Marks:
    """The text of a rendering so far, and its marks."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        check_time: Callable[[], None],
        limits: Limits,
    ) -> None:
        self._check_time, self._limits = check_time, limits
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
        if self._length > self._limits.characters:
            raise TemplateError(f"it writes more than {self._limits.characters:,} characters")

    def reach(self, kind: str, loop: int = 0, item: object = None) -> str:
        """Records a mark. The template calls it, and writes the empty string that it returns."""
        self._num_reached += 1
        if self._num_reached > self._limits.passes:
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
    """Inserts marks at the start of each loop's body and after each loop. Also replaces `a ~ b` by
    a call, so that the sandbox can bound its size.
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
    """Returns the item of a loop: `m` in {% for m in messages %}, and `messages[i]` in {% for i in
    range(messages | length) %}, the form of EXAONE 4.
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
    """The tag {% generation %} ... {% endgeneration %} of transformers, with a mark at each end."""

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
