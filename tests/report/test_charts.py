"""Charts: places are right, nothing leaves the plot, odd values are harmless, and there is a text for everything."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.report.charts import Dot, Series, dot_plot, heat_map, line_chart, parallel_coordinates
from merganser.report.charts.axes import Axis, round_step

finite = st.floats(-1e9, 1e9, allow_nan=False)
positive = st.floats(1e-9, 1e9)


@given(st.lists(finite, min_size=1), st.booleans())
def test_ticks_lie_in_order_on_the_axis_at_round_values(values, log):
    values = [abs(v) + 1e-6 for v in values] if log else values
    axis = Axis.around(values, log=log)
    assert all(-1e-6 <= axis.place(v) <= 100 + 1e-6 for v in values)
    ticks = axis.ticks()
    places = [tick.place for tick in ticks]
    assert places == sorted(places)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert len({tick.text for tick in ticks}) == len(ticks) <= 12


@given(st.floats(1e-12, 1e12))
def test_steps_are_round_and_not_much_larger(step):
    found = round_step(step)
    mantissa = found / 10 ** math.floor(math.log10(found) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5, 10)) < 1e-6
    assert step * (1 - 1e-9) <= found <= 2.5 * step * (1 + 1e-9)


def test_ticks_say_what_a_person_would():
    assert [tick.text for tick in Axis(0.78, 0.91).ticks()] == ["0.80", "0.85", "0.90"]
    assert [tick.text for tick in Axis(-5, 5).ticks()] == ["−4", "−2", "0", "2", "4"]
    assert [tick.text for tick in Axis(0.9, 3.1, whole=True).ticks()] == ["1", "2", "3"]
    assert [tick.text for tick in Axis(0.0, 12.4, whole=True).ticks()] == ["0", "5", "10"]
    assert [tick.text for tick in Axis(0, 12_000).ticks()] == ["0", "2,500", "5,000", "7,500", "10,000"]
    assert [tick.text for tick in Axis(0.02, 300, log=True).ticks()] == ["0.1", "1", "10", "100"]
    assert [tick.text for tick in Axis(1, 9, log=True).ticks()] == ["1", "2", "5"]


def marks(chart, kind):
    return [tuple(map(float, found)) for found in re.findall(rf'class="{kind}[^>]*d="M([\d.]+) ([\d.]+)', chart)]


def test_dots_stand_where_their_values_are():
    chart = dot_plot([Dot("a", 0.0), Dot("b", 5.0, 2.5, 7.5), Dot("c", 10.0)], "score", guide=5.0)
    (a, ya), (b, yb), (c, yc) = marks(chart, "dot")
    assert (b - a) == pytest.approx(c - b, abs=0.02)
    assert ya < yb < yc
    ((low, y),) = marks(chart, "range")
    assert y == yb
    assert low == pytest.approx((a + b) / 2, abs=0.02)
    assert marks(chart, "guide") == [(b, 0.0)]
    assert "b: 5 (2.5 to 7.5)" in chart


def test_long_names_differ_where_they_differ():
    chart = str(dot_plot([Dot(f"/data/models/of/a/long/path/{name}", 1.0) for name in ("math", "code")], "score"))
    assert "…" in chart
    assert all(f"path/{name}<" in chart for name in ("math", "code"))


@given(st.lists(st.tuples(finite, st.none() | st.floats()), max_size=20), st.booleans(), st.booleans())
def test_lines_stay_inside_whatever_the_values(points, log_x, log_y):
    chart = line_chart([Series("s", [x for x, _ in points], [y for _, y in points])], log_x=log_x, log_y=log_y)
    assert all(-1e-6 <= place <= 100 + 1e-6 for mark in marks(chart, "dot") for place in mark)
    assert "nan" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", chart)


def test_names_across_are_places_in_order():
    chart = line_chart([Series("s", ["x", "y", "z"], [1, None, 3])], "block", "norm")
    assert len(marks(chart, "dot")) == 2
    assert "<title>s: z, 3</title>" in chart
    assert all(f">{name}</span>" in chart for name in "xyz")


def test_heat_maps_draw_every_cell_that_has_a_colour_once():
    values = [[1.0, -1.0, 0.0], [0.5, float("nan"), -0.5]]
    chart = heat_map(values, ["a", "b"], ["x", "y", "z"])
    cells = {
        (colour, float(level)): re.findall(r"M(\d+) (\d+)h1", path)
        for colour, level, path in re.findall(r'fill="var\(--(\w+)\)" fill-opacity="([\d.]+)" d="([^"]*)"', chart)
    }
    assert cells == {
        ("hot", 1.0): [("0", "0")],
        ("cold", 1.0): [("1", "0")],
        ("hot", 0.5): [("0", "1")],
        ("cold", 0.5): [("2", "1")],
    }


def test_a_heat_map_of_many_layers_is_small():
    chart = heat_map([[i * j / 5600 for j in range(28)] for i in range(200)], [f"layer {i}" for i in range(200)], [])
    assert len(chart) < 100_000


def test_parallel_coordinates_draw_the_best_last_and_strongest():
    chart = parallel_coordinates(["w", "method"], [[0.2, "ties"], [0.8, "tsv"]], [0.9, 0.1])
    opacities = [float(found) for found in re.findall(r'stroke-opacity="([\d.]+)"', chart)]
    assert opacities == [0.1, 1.0]
    assert chart.index("w 0.8, method tsv: 0.1") < chart.index("w 0.2, method ties: 0.9")


@pytest.mark.parametrize(
    "chart",
    [
        dot_plot([], "nothing"),
        dot_plot([Dot("<b>", 1.0)], "<x>"),
        line_chart([], "x", "y"),
        line_chart([Series("<s>", [1], [1])], "<x>", "<y>", caption="<c>"),
        heat_map([], [], []),
        heat_map([[0.0]], ["<r>"], ["<c>"], caption="<c>"),
        parallel_coordinates(["<w>"], [["<v>"]], [1.0]),
    ],
)
def test_what_a_user_wrote_is_escaped_and_every_chart_has_a_text(chart):
    assert re.search(r'role="img" aria-label="[^"]+"', chart)
    assert not re.search(r"<(b|s|x|y|c|r|w|v)>", chart)
    assert chart.count("<figure") == chart.count("</figure>") == 1


def test_whole_numbers_have_whole_ticks_and_narrow_logarithmic_axes_more_than_one():
    chart = line_chart([Series("best", [1, 2, 3], [0.1, 0.2, 0.3])], "generation", "score")
    assert re.findall(r'left:[\d.]+%">([^<]*)<', chart) == ["1", "2", "3"]
    texts = [float(tick.text) for tick in Axis.around([438.2, 486.9], log=True).ticks()]
    assert len(texts) > 2
    assert all(360 < value < 590 for value in texts)


def test_names_below_a_chart_stand_upright_on_narrow_pages():
    chart = line_chart([Series("rank", ["embed_tokens", "layers.0"], [3, 4])])
    assert 'class="xs upright narrow"' in chart
