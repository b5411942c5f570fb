"""Chat templates of others: what is larger than the limits is refused before it is made, and all
else reads as in Jinja.

Templates here are harmless anywhere: the limits are lowered, the templates are not large.
"""

import time
import tracemalloc

import pytest
from jinja2 import Environment, TemplateError

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.templates.chat_template import ChatTemplate
from megatron.sft.data.templates.marked import MarkedTemplate
from megatron.sft.data.templates.sandbox import LIMITS

LOW = LIMITS._replace(
    characters=1000, made=20_000, passes=100, factor=100, power=10, indent=9, parts=50
)
GROWS = (
    "{%% set n = namespace(x='aaaa') %%}{%% for i in range(12) %%}{%% set n.x = %s %%}{%% "
    "endfor %%}{{ n.x }}"
)
LONG = "{% for i in range(30) %}" + "x" * 50 + "{% endfor %}"


class _Own(dict[str, object]):
    """A dict with items of its own, as objects of JSON text are."""

    def __missing__(self, key: str) -> str:
        return f"no {key}"


CHAT = Conversation([Message("user", "q"), Message("assistant", "a")], None, {})


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'a'.ljust(9) }}", "{{ 'a'['rjust'](9) }}", "{{ ('a'|attr('center'))(9) }}"),
        *(
            "{{ 'a'.encode().zfill(9) }}",
            "{{ 'a'|center(9) }}",
            "{{ ['a']|map('center', 9)|list }}",
        ),
        *("{{ 'a\nb'|indent(1000) }}", "{{ [1]|tojson(indent=10) }}", "{{ lipsum(n=1) }}"),
        *("{{ ('a'*50)*50 }}", "{{ ['a'*50]*50 }}", "{{ [['a'*50]*50]|string }}"),
        *(
            "{{ ['a'*50]*50 ~ 'b' }}",
            "{{ (['a'*50]*50)|join }}",
            "{{ [('a'*50)]*50|tojson }}",
        ),
        *("{{ '%100d' % 3 }}", "{{ '%*d' % (9, 3) }}", "{{ '%100d'|format(3) }}"),
        *("{{ '{:100}'.format(3) }}", "{{ '{:{}}'.format(3, 9) }}", "{{ 2 * 101 }}"),
        *("{{ 2 ** 11 }}", "{{ '%0100d' % 3 }}"),
        *("{{ ('a '*20*5).split() }}", "{{ ([{'a': 'x'*50}]*50)|join(attribute='a') }}"),
        *(
            GROWS % grown
            for grown in ("n.x ~ n.x", "n.x + n.x", "[n.x, n.x]|join", "''.join([n.x, n.x])")
        ),
        *(
            GROWS % grown
            for grown in ("n.x.replace('a', 'aa')", "n.x|replace('', 'aa')", "'%s%s' % (n.x, n.x)")
        ),
        *(GROWS % grown for grown in ("'{0}{0}'.format(n.x)", "[n.x, n.x]", "[n.x] + [n.x]")),
        *(
            LONG,
            "{% set t %}" + LONG + "{% endset %}",
            "{% macro m() %}" + LONG + "{% endmacro %}{{ m() }}",
        ),
        "{% for i in range(90) %}{% set x = 'a' * 90 ~ 'a' * 90 ~ 'a' * 90 %}{% endfor %}",
    ],
)
def test_what_is_beyond_the_limits_is_refused(source):
    """With the limits of the product, such templates would fill the memory."""
    with pytest.raises(
        ValueError, match=r"^the chat template (refuses|cannot be read|fails)"
    ) as caught:
        ChatTemplate(source, {}, limits=LOW).render(CHAT)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [
        *(
            "text * 90",
            "text ~ text ~ text ~ text",
            "[text] * 90 ~ ''",
            "text.replace('a', 'bbbb')",
        ),
        *(
            "text|replace('a', 'bbbb')",
            "([text] * 9)|join",
            "'%s%s%s%s' % (text, text, text, text)",
        ),
        *("'{0}{0}{0}{0}'.format(text)", "text.split('a')", "text|list"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(made):
    """A check behind it would come when the memory is full."""
    text = "a" * 200_000
    source = "{{ (MADE)|length }}".replace("MADE", made)
    template = MarkedTemplate(source, LOW._replace(characters=500_000))
    tracemalloc.start()
    with pytest.raises(TemplateError):
        template.write([], text=text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 450_000


def test_a_loop_over_pairs_ends():
    """Only those over single names were counted."""
    with pytest.raises(TemplateError, match="it never ends"):
        MarkedTemplate(
            "{% for i in range(20) %}{% for k, v in pairs %}{% endfor %}{% endfor %}", LOW
        ).write([], pairs=[[1, 2]] * 20)


def test_each_rendering_has_the_whole_bound():
    """Samples would be refused after some thousands, by what was made for the others."""
    template = MarkedTemplate("{% for m in messages %}{{ m.content ~ '' }}{% endfor %}", LOW)
    text = "a" * 900
    for _ in range(30):
        assert template.write([{"role": "user", "content": text}]).text == text


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ 'a' ~ 3 ~ none ~ missing ~ [1, 'b'] }}",
            "{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2 }}{{ 1.5 * 2 }}{{ 'ab' * 3 }}",
        ),
        *(
            "{{ '%s-%3d|%%' % ('a', 3) }}",
            "{{ '{:>5}|{a}'.format(3, a='b') }}",
            "{{ '%s %s'|format('a', 1) }}",
        ),
        *(
            "{{ ['a', 1]|join('-') }}{{ [{'a': 1}, {'a': 2}]|join(', ', attribute='a') }}{{ "
            "'abc'|join(',') }}",
        ),
        *(
            "{{ 'banana'.replace('a', 'o') }}{{ 'banana'|replace('a', 'o', 2) }}{{ "
            "'banana'.replace('a', 'o', 1) }}",
        ),
        *("{{ 'a\nb\n\nc'|indent }}{{ 'a\nb'|indent(2, first=True) }}{{ 'a\nb'|indent('> ') }}",),
        *(
            "{{ ' a b '.strip().split() }}{{ 'a,b'.split(',')[-1] }}{{ 'a\nb'.splitlines()|length "
            "}}",
        ),
        *(
            "{{ [3, 1]|sort|list }}{{ 'abc'|reverse|list }}{{ {'b': 1, 'a': 2}|dictsort }}{{ "
            "'x'|upper|title|trim }}",
        ),
        *(
            "{{ [1, 2]|map('string')|join }}{{ [{'r': 1}]|selectattr('r', 'equalto', 1)|list }}{{ "
            "3.14|round(1) }}",
        ),
        *(
            "{% set t %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% endset %}{{ "
            "t }}",
        ),
        *(
            "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ m(m(1)) }}",
            "{{ 2 ** 10 }}{{ 7 % 4 }}{{ ', '.join(['a']) }}",
        ),
        *(
            "{{ true }}{{ none }}{{ missing }}{{ '<&>' }}{{ 'ab'[::-1] }}{{ 'a' in 'ab' }}{{ "
            "'x'|default('y') }}",
        ),
        # Items of dicts and attributes of loops are written as plain Python.
        *(
            f"{{{{ {m}.a }}}}{{{{ {m}['a'] }}}}{{{{ {m}.b }}}}{{{{ {m}['b'] }}}}{{{{ {m}['items'] "
            f"}}}}{{{{ {m}.items()|list }}}}{{{{ {m}.first|trim }}}}{{{{ {m}.a|trim('1') }}}}"
            for m in ("m", "own", "[m][0]")
        ),
        *(
            "{% for x in 'ab' %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ "
            "loop.length }}{{ loop['index'] }}{% endfor %}",
            "{{ m['{}'] }}{{ m['{0}{x}'] }}{{ own['}{'] }}{{ own['a{b}'].upper() }}",
            "{% autoescape true %}{{ own['<'] }}{{ '&' }}{% endautoescape %}{{ own['<'] }}",
            "{% autoescape m.a %}{{ own['<'] }}{{ '&'|safe }}{% endautoescape %}",
            "{% set loop = m %}{{ loop.first }}{{ loop.last }}{{ 'x'['upper']() }}{{ 'x'['b'] }}",
        ),
    ],
)
def test_all_else_reads_as_in_jinja(source):
    m = {"a": 1, "items": "i", "first": " f "}
    variables = {"m": m, "own": _Own(m)}
    ours = MarkedTemplate(source).write([], **variables).text
    assert ours == Environment().from_string(source).render(variables)


def test_json_reads_as_chat_templates_mean_it():
    source = "{{ {'b': '<', 'a': [1, none]}|tojson }}{{ [1]|tojson(indent=2) }}{{ 'ü'|tojson }}"
    assert MarkedTemplate(source).write([]).text == '{"b": "<", "a": [1, null]}[\n  1\n]"ü"'


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(17) "
        "}}",
        "{% for i in range(400) %}{% set x = range(9999)|sort|list|length %}{% endfor %}",
    ],
)
def test_a_template_that_takes_long_ends(source):
    """A data worker would hang at its first record, and the run with it, without a word."""
    with pytest.raises(TemplateError, match=r"it takes longer than 0.1 seconds"):
        MarkedTemplate(source, LIMITS._replace(seconds=0.1)).write([])


def test_time_in_which_a_process_is_stopped_does_not_count():
    """A job that was suspended would end at the record that it was at."""

    def wait() -> str:
        time.sleep(0.06)
        return ""

    template = MarkedTemplate(
        "{% for m in messages %}{{ wait() }}{{ m }}{% endfor %}", LIMITS._replace(seconds=0.05)
    )
    assert template.write([{"a": 1}] * 3, wait=wait).text.count("a") == 3
