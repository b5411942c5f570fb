"""Chat templates of others: what fills the memory is refused before it does, and all else reads as
in Jinja.
"""

import time
import tracemalloc

import pytest
from jinja2 import Environment, TemplateError

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.templates.chat_template import ChatTemplate
from megatron.sft.data.templates.marked import MarkedTemplate

GROWS = (
    "{%% set n = namespace(x='aaaa') %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% "
    "endfor %%}{{ n.x }}"
)
LONG = "{% for i in range(3000) %}" + "x" * 5000 + "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ 'a'.ljust(10**9) }}",
            "{{ 'a'['rjust'](10**9) }}",
            "{{ ('a'|attr('center'))(10**9) }}",
        ),
        *(
            "{{ 'a'.encode().zfill(10**9) }}",
            "{{ 'a'|center(10**9) }}",
            "{{ ['a']|map('center', 10**9)|list }}",
        ),
        *("{{ 'a\nb'|indent(10**9) }}", "{{ [1]|tojson(indent=10**9) }}", "{{ lipsum(n=10**9) }}"),
        *("{{ ('a'*10000)*10000 }}", "{{ ['a'*10000]*10000 }}", "{{ [['a'*10000]*10000]|string }}"),
        *(
            "{{ ['a'*10000]*10000 ~ 'b' }}",
            "{{ (['a'*10000]*10000)|join }}",
            "{{ [('a'*10000)]*10000|tojson }}",
        ),
        *("{{ '%1000000000d' % 3 }}", "{{ '%*d' % (10**9, 3) }}", "{{ '%1000000000d'|format(3) }}"),
        *("{{ '{:1000000000}'.format(3) }}", "{{ '{:{}}'.format(3, 10**9) }}"),
        *("{{ ('a '*5000*200).split() }}", "{{ ([{'a': 'x'*10000}]*10000)|join(attribute='a') }}"),
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
    ],
)
def test_what_fills_the_memory_is_refused(source):
    """`'a'.ljust(10**9)` took a gigabyte, and longer than a sample may."""
    # The power is one of Jinja's own, which is refused as such.
    source = source.replace("10**9", "1000000000")
    template = ChatTemplate(source, {})
    tracemalloc.start()
    with pytest.raises(
        ValueError, match=r"^the chat template (refuses|cannot be read|fails)"
    ) as caught:
        template.render(Conversation([Message("user", "q"), Message("assistant", "a")], None, {}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_refusals_come_soon():
    for source in (
        "{{ 'a'.ljust(1000000000) }}",
        GROWS % "n.x ~ n.x",
        GROWS % "n.x|replace('', 'aa')",
    ):
        start = time.process_time()
        with pytest.raises(TemplateError):
            MarkedTemplate(source).write([])
        assert time.process_time() - start < 1


def test_a_loop_over_pairs_ends(monkeypatch):
    """Only those over single names were counted."""
    monkeypatch.setattr("megatron.sft.data.templates.marked._MAX_PASSES", 1000)
    with pytest.raises(TemplateError, match="it never ends"):
        MarkedTemplate(
            "{% for i in range(100000) %}{% for k, v in pairs %}{% endfor %}{% endfor %}"
        ).write([], pairs=[[1, 2]] * 100_000)


def test_each_rendering_has_the_whole_bound():
    """Samples would be refused after some thousands, by what was made for the others."""
    template = MarkedTemplate("{% for m in messages %}{{ m.content ~ '' }}{% endfor %}")
    text = "a" * 5_000_000
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
    ],
)
def test_all_else_reads_as_in_jinja(source):
    assert MarkedTemplate(source).write([]).text == Environment().from_string(source).render()


def test_json_reads_as_chat_templates_mean_it():
    source = "{{ {'b': '<', 'a': [1, none]}|tojson }}{{ [1]|tojson(indent=2) }}{{ 'ü'|tojson }}"
    assert MarkedTemplate(source).write([]).text == '{"b": "<", "a": [1, null]}[\n  1\n]"ü"'


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) "
        "}}",
        "{% for i in range(90000) %}{% set x = range(90000)|sort|list|length %}{% endfor %}",
    ],
)
def test_a_template_that_takes_hours_ends(source, monkeypatch):
    """A data worker would hang at its first record, and the run with it, without a word."""
    monkeypatch.setattr("megatron.sft.data.templates.sandbox.MAX_SECONDS", 0.2)
    start = time.process_time()
    with pytest.raises(TemplateError, match=r"it takes longer than 0.2 seconds"):
        MarkedTemplate(source).write([])
    assert time.process_time() - start < 5


def test_time_in_which_a_process_is_stopped_does_not_count(monkeypatch):
    """A job that was suspended would end at the record that it was at."""
    monkeypatch.setattr("megatron.sft.data.templates.sandbox.MAX_SECONDS", 0.01)

    def wait() -> str:
        time.sleep(0.02)
        return ""

    template = MarkedTemplate("{% for m in messages %}{{ wait() }}{{ m }}{% endfor %}")
    assert template.write([{"a": 1}] * 3, wait=wait).text.count("a") == 3
