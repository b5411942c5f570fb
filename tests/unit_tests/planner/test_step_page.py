"""The page must open anywhere, and a name in it must not become markup."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.step_page import Table, drawing, page
from megatron.planner.step_picture import picture_of
from megatron.planner.step_record import StepLayout, StepRecord

LAYOUT = StepLayout(
    num_ranks=2,
    capacity=9,
    alignment=Alignment(),
    cost=PackCost(1.0, 0.0, 1.0),
    model=StepModel(num_stages=2),
    seconds_per_unit=0.001,
)
PACKS = [[[3, 4], [5]], [[9], [1, 1, 1]]]
PICTURE = picture_of(StepRecord(title="<step & 1>", scheduler="a:b", layout=LAYOUT, packs=PACKS))


def test_drawing_is_valid_and_holds_every_pack():
    """A pack that is missing from the picture looks like a bubble."""
    tree = ElementTree.fromstring(drawing(PICTURE))
    titles = [node.text or "" for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    for rank in (0, 1):
        for microbatch in (0, 1):
            assert (
                sum(title.startswith(f"rank {rank}, microbatch {microbatch}:") for title in titles)
                == 1
            )
    assert sum(title.startswith("stage 1, backward") for title in titles) == 2
    for node in tree.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(node.get("width", 0)) > 0
        assert float(node.get("height", 0)) > 0


def test_page_needs_nothing_and_escapes():
    """No script, no other server: a page may be mailed and opened years later."""
    text = page(
        "plan", "1 < 2", [PICTURE], Table(("", "<b>"), [("default", "1")], best=0), ["less & less"]
    )
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    for raw, escaped in (
        ("<b>", "&lt;b&gt;"),
        ("1 < 2", "1 &lt; 2"),
        ("less & less", "less &amp; less"),
    ):
        assert escaped in text
        assert raw not in text
    assert "a:b: &lt;step &amp; 1&gt;" in text
    assert text.count('class="best"') == 1


def test_bound_is_drawn_by_its_name():
    """What a pipeline may fall below is no lower bound."""
    text = page("plan", "", [replace(PICTURE, bound=0.9)], None, [])
    assert "red line: bound of even packs" in text
    assert "<title>bound of even packs</title>" in text
    assert "lower bound" not in text
    assert "red line" not in page("plan", "", [replace(PICTURE, bound=1.1)], None, [])


def test_shorter_steps_are_drawn_shorter():
    """Side by side, half the time must be half the width."""
    short = picture_of(
        StepRecord(title="x", scheduler="y", layout=LAYOUT, packs=[[[1], [1]], [[1], [1]]])
    )
    text = page("plan", "", [PICTURE, short], None, [])
    widths = [
        float(width) for width in re.findall(r'width="([\d.]+)" height="46.0" fill="#eceff2"', text)
    ]
    assert widths[0] == 1000
    assert widths[1] / 1000 == pytest.approx(short.cost / PICTURE.cost, rel=1e-3)


def test_plot_has_as_many_panels(tmp_path):
    """The PNG shows the same."""
    pytest.importorskip("matplotlib")
    from megatron.planner.step_plot import figure_of

    figure = figure_of([PICTURE, PICTURE])
    assert len(figure.axes) == 2 * 3
    labels = [
        figure_of([replace(PICTURE, bound=bound)]).axes[-1].get_xlabel() for bound in (0.9, 1.1)
    ]
    assert labels == ["modelled time; dashed red: bound of even packs", "modelled time"]
    figure.savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
