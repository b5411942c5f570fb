"""pure. Renders a Jinja template, and records the place of each message in the text.

Calls of a function are inserted into the template's syntax tree: at the start of each loop pass,
after each loop, and at both ends of {% generation %}. The function writes nothing. It records how
many parts were written so far, and the message that the loop is at. A single rendering thus gives
all places:

    {% for m in messages %}MARK(m)<{{ m.role }}>{{ m.content }}{% endfor %}MARK(none)
    "<", "user", ">", "hi", "<", "assistant", ">", "yo"
    marks behind 0 parts (message 0), 4 (message 1) and 8: turns [0, 8) and [8, 21) of the text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
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
    call_of_sandbox,
    check_private_names,
)


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
        sandbox, parts = self._sandbox, list[str]()
        marks = _Marks(messages, parts, sandbox)
        sandbox.begin(marks.reach)
        with sandbox.time_limit():
            for part in self._compiled.generate({**variables, "messages": messages}):
                parts.append(part)
        return marks.written()


class _Place(NamedTuple):
    """A recorded mark: number of parts before it, number of the loop, number of the message or
    None.
    """

    num_parts: int
    loop: int
    message: int | None


class _Marks:
    """The marks of a rendering."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], parts: Sequence[str], sandbox: Sandbox
    ) -> None:
        """parts: the text of the rendering so far, which grows."""
        self._parts, self._sandbox = parts, sandbox
        self._number_of = {id(message): number for number, message in enumerate(messages)}
        self._num_reached = 0
        self._places: list[_Place] = []
        self._message: int | None = None
        self._opened: list[tuple[int, int | None]] = []
        self._generated: list[tuple[int, int, int | None]] = []

    def reach(self, kind: str, loop: int = 0, item: object = None) -> None:
        """Records a mark. The template calls it."""
        self._num_reached += 1
        num_parts = len(self._parts)
        # Parts are texts that exist already, so that only their number takes memory.
        if num_parts > self._sandbox.limits.characters:
            raise TemplateError(f"it writes more than {self._sandbox.limits.characters:,} texts")
        if self._num_reached > self._sandbox.limits.passes:
            raise EndlessTemplateError("it never ends")
        self._sandbox.check_time()
        if kind == "turn":
            message = self._number_of.get(id(item))
            self._places.append(_Place(num_parts, loop, message))
            self._message = self._message if message is None else message
        elif kind == "generation":
            self._opened.append((num_parts, self._message))
        elif kind == "end":
            start, message = self._opened.pop()
            self._generated.append((start, num_parts, message))

    def written(self) -> Written:
        """Returns the whole rendering. Raises TemplateError if it is too long."""
        # Characters before each part: "<", "user", ">" -> 0, 1, 5, 6
        starts = [0, *accumulate(map(len, self._parts))]
        limit = self._sandbox.limits.characters
        if starts[-1] > limit:
            raise TemplateError(f"it writes more than {limit:,} characters")
        turns: dict[int, list[tuple[int, int]]] = {}
        last: dict[int, _Place] = {}
        loop_end = 0
        for place in self._places:
            before = last.get(place.loop)
            if before is not None and before.message is not None:
                start, loop_end = starts[before.num_parts], starts[place.num_parts]
                if loop_end > start:
                    turns.setdefault(before.message, []).append((start, loop_end))
            last[place.loop] = place
        generated = [
            (starts[start], starts[end], message) for start, end, message in self._generated
        ]
        return Written("".join(self._parts), turns, generated, loop_end)


class _MarkTurns(NodeTransformer):
    """Inserts marks at the start of each loop's body and after each loop. Also replaces `a ~ b` by
    a call, so that the sandbox can bound its size, and sums by one call.
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
        return call_of_sandbox("joined", node.nodes)

    def visit_Add(self, node: nodes.Add) -> Any:
        # a + b + c is (a + b) + c: a sum of texts is counted and made once.
        terms: list[Any] = [node.right]
        first: Any = node.left
        while isinstance(first, nodes.Add):
            terms.append(first.right)
            first = first.left
        terms = [self.visit(term) for term in (first, *reversed(terms))]
        return call_of_sandbox("added", terms)


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


def _mark(kind: str, *arguments: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(call_of_sandbox("mark", [nodes.Const(kind), *arguments]))
