"""Pictures of planes: networks stand where they are, and two pictures share their colours."""

from __future__ import annotations

import re

import pytest

from merganser.report.landscapes import barrier_verdict, plane_chart, segment_chart

PLANE = {
    "xs": [-1.0, 0.0, 1.0, 2.0, 3.0],
    "ys": [-1.0, 0.0, 1.0],
    "losses": [[0.1, 0.2, 0.3, 0.4, 0.5]] * 3,
    "anchors": [[0.0, 0.0], [2.0, 0.0], [1.0, 1.0]],
}


def test_networks_are_marked_where_they_are_with_the_first_row_at_the_bottom():
    chart = plane_chart(PLANE, ["a", "b", "c"], "A plane.", also=[5.0])
    points = re.findall(r'class="point" d="M([\d.]+) ([\d.]+)h0"><title>(\w)', chart)
    places = {name: (float(x), float(y)) for x, y, name in points}
    assert places == {"a": (25.0, 50.0), "b": (75.0, 50.0), "c": (50.0, 0.0)}
    assert "Colours from 0.1 to 5, logarithmic" in chart
    assert "c at (1, 1)" in chart


def curve(*losses):
    ends = (losses[0] + losses[-1]) / 2
    positions = [i / (len(losses) - 1) for i in range(len(losses))]
    return {"positions": positions, "losses": list(losses), "barrier": max(losses) - ends}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (curve(0, 2, 0), curve(0, 0.5, 0), "lowered the loss barrier of the pair, on average from 2 to 0.5"),
        (curve(0, 1, 0), curve(0, 2, 0), "lowered no loss barrier: on average they went from 1 to 2"),
    ],
)
def test_the_verdict_says_what_alignment_did(before, after, said):
    assert said in barrier_verdict([{"models": ["a", "b"], "before": before, "after": after}])
    chart = segment_chart({"before": before, "after": after})
    assert "before from 0 to" in chart
