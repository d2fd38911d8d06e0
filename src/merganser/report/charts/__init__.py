"""Charts as inline SVG and HTML: no script, no library, any width, light and dark.

Every function returns a piece of HTML for `Page.chart`. Geometry is drawn in a square of 100 × 100 that stretches with
the page while strokes and text keep their size. Each mark has a tooltip with its value, and each chart has a text
alternative.
"""

from merganser.report.charts.dots import Dot, dot_plot
from merganser.report.charts.heat import heat_map
from merganser.report.charts.lines import Series, line_chart
from merganser.report.charts.parallel import parallel_coordinates
from merganser.report.charts.style import STYLE

__all__ = ["STYLE", "Dot", "Series", "dot_plot", "heat_map", "line_chart", "parallel_coordinates"]
