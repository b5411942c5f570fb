"""pure. Jinja's sandbox with bounds on memory and time: chat templates are code from files of
others.

A template either renders or fails with one line. The size of each text is checked before it is made
(products, sums, joined and replaced texts, widths of formats), and so is the sum of all sizes in
one rendering. A single operation that takes for ever ends the process, see `TimeLimit`.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import BuiltinMethodType
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.blending.loading.time_limit import TIME_LIMIT
from megatron.packing.quoting import shown

_POINTER = 8
"""Characters that a value other than a text counts as."""
_WIDTHS = re.compile(r"[1-9]\d*")
_VARIABLE_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|:[^}]*\{")
"""A width that is an argument."""
# Methods and filters that no chat template needs, and whose width has no bound.
_NO_METHODS = frozenset("center expandtabs format_map ljust rjust translate zfill".split())
_NO_FILTERS = frozenset("batch center pprint slice urlize wordwrap xmlattr".split())
_MAKE_NOTHING = frozenset("count d default first last length".split())
"""Filters whose arguments need no count: they return one of them, a part or a number."""
_OF_DICT = frozenset(dir(dict))
_OF_LOOP = ("first", "index", "index0", "last")
"""Attributes of Jinja's `loop` that templates read at each message."""
_MAX_REMEMBERED = 1000
"""Largest number of attributes whose safety is remembered."""


class EndlessTemplateError(TemplateError):
    """A template takes too long."""


class Limits(NamedTuple):
    """Limits of one rendering. Released templates come nowhere near them."""

    characters: int = 1 << 23
    """Characters of the rendering, and of any text that the template makes."""
    made: int = 1 << 29
    """Sum of the characters of all texts: some tenths of a second."""
    seconds: float = 10.0
    """Seconds of processor time."""
    seconds_at_most: float = 15.0
    """Seconds of processor time after which the process is ended."""
    passes: int = 1_000_000
    """Passes of all loops."""
    factor: int = 10_000
    """Factor of a product, and width of a format."""
    power: int = 100
    indent: int = 100
    """Indentation of JSON."""
    parts: int = 100_000
    """Parts that a text is taken into."""


LIMITS = Limits()


class _CodeGenerator(CodeGenerator):
    """Jinja's, with what most of a rendering is written as Python that calls nothing:

        {{ m.role }}    t_2 if type(t_2 := (t_1["role"] if type(t_1 := m) is dict and "role" in t_1
                            else environment.getattr(t_1, "role"))) is str
                        else str(environment.finalize(t_2))

    Also writes calls of the sandbox's own functions (`call_of_sandbox`) as plain calls. Calls in a
    template are checked; it has no syntax for these.
    """

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _may_escape(frame):
            super()._output_child_pre(node, frame, finalize)
            return
        self._written = self.temporary_identifier()
        self.write(f"({self._written} if type({self._written} := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _may_escape(frame):
            super()._output_child_post(node, frame, finalize)
            return
        self.write(f") is str else str({finalize.src}{self._written})))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if type(key) is str:
            self._write_item(node.node, frame, key, "getitem")
        else:
            super().visit_Getitem(node, frame)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        name = node.attr
        if name in _OF_LOOP and isinstance(node.node, nodes.Name):
            at = self.temporary_identifier()
            self.write(f"({at}.{name} if type({at} := ")
            self.visit(node.node, frame)
            self.write(f") is LoopContext else environment.getattr({at}, {name!r}))")
        elif name not in _OF_DICT:
            self._write_item(node.node, frame, name, "getattr")
        else:
            super().visit_Getattr(node, frame)

    def _write_item(self, node: nodes.Expr, frame: Frame, key: str, function: str) -> None:
        """Writes an item of a dict, where the object is one and has it; otherwise a call of the
        sandbox's `function`.
        """
        at = self.temporary_identifier()
        self.write(f"({at}[{key!r}] if type({at} := ")
        self.visit(node, frame)
        otherwise = f"environment.{function}({at}, {key!r})"
        self.write(f") is dict and {key!r} in {at} else {otherwise})")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


def _may_escape(frame: Frame) -> bool:
    """Returns whether a template asks for HTML there, by {% autoescape %}."""
    return frame.eval_ctx.volatile or frame.eval_ctx.autoescape


def call_of_sandbox(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """Returns a call of the sandbox's method `name` for a template's syntax tree."""
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which also refuses texts that are too large and renderings that
    take too long.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _CodeGenerator
    mark: Callable[..., None]
    """Function that a template with marks calls (`marked`)."""

    def __init__(self, limits: Limits = LIMITS, **options: object) -> None:
        super().__init__(finalize=self.counted, **options)
        self.limits = limits
        self._are_safe: dict[tuple[type, str], bool] = {}
        self._too_long = (
            f"the chat template takes longer than {limits.seconds_at_most:g} seconds in one "
            "operation; pass another --chat-template"
        )
        self.begin(lambda *_: None)
        del self.globals["lipsum"]
        own = {"join": _join, "replace": _replace, "indent": _indent, "tojson": _to_json}
        kept = {name: function for name, function in FILTERS.items() if name not in _NO_FILTERS}
        self._trim = self._bounded(FILTERS["trim"])
        self.filters = {
            name: function if name in _MAKE_NOTHING else self._bounded(function)
            for name, function in {**kept, **own}.items()
        }
        self.filters["trim"] = self.trimmed
        self.globals["raise_exception"] = _raise_exception

    def begin(self, mark: Callable[..., None]) -> None:
        """Resets the counts of characters and of time for the next rendering, and sets its
        function `mark`.
        """
        self.mark = mark
        self._made = 0
        self._started = time.thread_time()
        self._next_look = time.monotonic() + self.limits.seconds

    def time_limit(self) -> AbstractContextManager[None]:
        """Returns a context that ends this process if its body takes longer than any rendering may:
        in one operation in C, which `check_time` does not see.
        """
        return TIME_LIMIT.limited(self.limits.seconds_at_most, self._too_long)

    def check_time(self) -> None:
        """Raises EndlessTemplateError after `limits.seconds` of processor time. It is called in
        each loop pass, at each call and by filters: between two of them a template has an end.

        Real time, which is cheap to read, is checked first. Processor time decides, so that a
        process that was stopped for a while does not fail.
        """
        if time.monotonic() < self._next_look:
            return
        taken = time.thread_time() - self._started
        if taken >= self.limits.seconds:
            raise EndlessTemplateError(f"it takes longer than {self.limits.seconds:g} seconds")
        self._next_look = time.monotonic() + self.limits.seconds - taken

    def make(self, size: int) -> None:
        """Counts a text or list of `size` characters that is about to be made. Raises TemplateError
        if it is too large, or all together are.
        """
        self._made += size
        if size > self.limits.characters or self._made > self.limits.made:
            raise TemplateError(f"it makes a text of {size:,} characters, or one again and again")

    def counted(self, value: object) -> Any:
        """Returns a value that is about to be written. Counts the text that is made of it."""
        if type(value) is not str:
            self.make(self._size(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Joins the parts that a block or a macro has written."""
        parts = list(parts)
        self.make(sum(map(len, parts)))
        return "".join(parts)

    def joined(self, *parts: object) -> str:
        """Returns `a ~ b`. Jinja has no hook for this operator; `marked` replaces it by a call."""
        return self.concat([str(self.counted(part)) for part in parts])

    def added(self, *terms: Any) -> Any:
        """Returns a sum, from the left; of texts alone it is made once."""
        size = 0
        for term in terms:
            if type(term) is not str:
                break
            size += len(term)
        else:
            self.make(size)
            return "".join(terms)
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), terms)

    def trimmed(self, value: Any, chars: Any = None) -> Any:
        """Returns `value | trim`."""
        if type(value) is str and chars is None:
            self.make(len(value))
            return value.strip()
        return self._trim(value, chars)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self.check_format(left, [right])
        if (
            operator == "+"
            and isinstance(left, (str, list, tuple))
            and isinstance(right, (str, list, tuple))
        ):
            self.make((len(left) + len(right)) * (1 if isinstance(left, str) else _POINTER))
        if operator in ("*", "**"):
            sizes = [
                len(one) if isinstance(one, (str, bytes, list, tuple)) else one
                for one in (left, right)
            ]
            numbers = [abs(size) for size in sizes if isinstance(size, (int, float))]
            limit = self.limits.power if operator == "**" else self.limits.factor
            if max(numbers, default=0) > limit:
                raise TemplateError(f"it asks for a product of {numbers[0]} and {numbers[-1]}")
            if sizes != [left, right] and len(numbers) == 2:
                is_text = isinstance(left, (str, bytes)) or isinstance(right, (str, bytes))
                self.make(int(numbers[0] * numbers[1]) * (1 if is_text else _POINTER))
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns `obj.attribute`, or `obj["attribute"]`, as Jinja's sandbox does.

        It is the most frequent call of a rendering. Jinja's verdict on an attribute is one on the
        type of the object, so that it is asked once for each type.
        """
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        is_safe = self._are_safe.get((kind, attribute))
        if is_safe is None:
            is_format = attribute in ("format", "format_map")  # wrapped by `wrap_str_format`
            is_safe = not is_format and self.is_safe_attribute(obj, attribute, None)
            if len(self._are_safe) < _MAX_REMEMBERED:
                self._are_safe[kind, attribute] = is_safe
        if is_safe:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        is_wide = isinstance(obj, (str, bytes)) and attr in _NO_METHODS
        return not is_wide and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self.check_time()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            name = obj.__name__
            self.make(len(text))
            if name == "replace" and len(arguments) > 1:
                self.make(_size_replaced(text, *arguments))
            elif name == "join" and arguments:
                arguments = (list(arguments[0]), *arguments[1:])
                self.make(len(text) * len(arguments[0]) + sum(map(self._size, arguments[0])))
            elif name in ("split", "rsplit", "splitlines"):
                separator = arguments[0] if name != "splitlines" and arguments else None
                self._check_parts(
                    text.count(separator) if separator else sum(map(str.isspace, text))
                )
            if type(obj) is BuiltinMethodType:  # safe, and takes no context
                options.pop("_loop_vars", None)
                options.pop("_block_vars", None)
                return obj(*arguments, **options)
        return super().call(context, obj, *arguments, **options)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*arguments: Any, **options: Any) -> str:
            self.check_format(value.__self__, [*arguments, *options.values()])
            return wrapped(*arguments, **options)

        return formatted

    def check_format(self, text: str, values: Iterable[Any]) -> None:
        is_wide = any(int(digits[:9]) >= self.limits.factor for digits in _WIDTHS.findall(text))
        if is_wide or _VARIABLE_WIDTH.search(text):
            raise TemplateError(f"it asks for a text as wide as {shown(text)} says")
        self.make(len(text) + (text.count("{") + text.count("%")) * sum(map(self._size, values)))

    def _size(self, value: object) -> int:
        return size_of(value, self.limits.characters)

    def _check_parts(self, count: int) -> None:
        if count > self.limits.parts:
            raise TemplateError(f"it takes a text into {count:,} parts")

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that refuses values that are too large."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        formats = function is FILTERS["format"]
        takes_apart = function in (FILTERS["list"], FILTERS["sort"], FILTERS["reverse"])

        @functools.wraps(function)
        def filtered(*arguments: object, **options: object) -> Any:
            self.check_time()
            for value in arguments[at:]:
                self.make(self._size(value))
            if formats:
                self.check_format(str(arguments[at]), [*arguments[at + 1 :], *options.values()])
            if takes_apart and isinstance(arguments[-1], str):
                self._check_parts(len(arguments[-1]))
            return function(*arguments, **options)

        return filtered


def size_of(value: object, limit: int = LIMITS.characters) -> int:
    """Returns approximately the number of characters of a value when it is written. It stops
    counting beyond a limit.
    """
    if isinstance(value, str):
        return len(value)
    size, pending = 0, [value]
    while pending and size <= limit:
        one = pending.pop()
        size += _POINTER
        if isinstance(one, (str, bytes, list, tuple)):
            size += len(one)
            pending += one if isinstance(one, (list, tuple)) else ()
        elif isinstance(one, Mapping):  # last, as this check is slow
            size += len(one)
            pending += [*one.keys(), *one.values()]
    return size


def check_private_names(tree: nodes.Template) -> None:
    """Raises TemplateError for names with an underscore, by which code can leave the sandbox."""
    attributes: Iterable[Any] = tree.find_all((nodes.Getattr, nodes.NSRef))
    private = next((node.attr for node in attributes if node.attr.startswith("_")), None)
    if private is not None:
        raise TemplateError(f"it uses the private name {private}, which is refused")


def _size_replaced(text: str, old: object, new: object, *_: object) -> int:
    return len(text) + text.count(str(old)) * len(str(new))


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    parts = list(
        value if attribute is None else map(make_attrgetter(environment, attribute), value)
    )
    environment.make(sum(map(environment._size, parts)) + len(str(d)) * len(parts))
    return str(d).join(map(str, parts))


@pass_environment
def _replace(environment: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    environment.make(_size_replaced(str(s), old, new))
    return str(s).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _indent(
    environment: Any, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    size = len(width) if isinstance(width, str) else width
    environment.make(len(str(s)) + (str(s).count("\n") + 1) * size)
    return FILTERS["indent"](str(s), width, first, blank)


@pass_environment
def _to_json(
    environment: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    **options: Any,
) -> str:
    """Returns plain JSON. Jinja's own filter escapes characters for HTML."""
    widest = environment.limits.indent
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > widest:
        raise TemplateError(f"it indents JSON by more than {widest}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
