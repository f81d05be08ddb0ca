"""Line charts: several series of points, as an SVG picture, in a terminal, or as a plain table.

No series is told apart by its colour alone: each has a marker and a dash of its own, and its name at its end. The
colours are those of Okabe and Ito, which people with the common colour deficiencies can tell apart.

    chart = Chart("Quality", "length (words)", "BLEU", (Series.of("lstm", [5, 10], [30, 20]),))
    Path("quality.svg").write_text(svg(chart), encoding="utf-8")
"""

from regard.viz.charts.chart import Chart, Point, Scale, Series
from regard.viz.charts.picture import scene, svg
from regard.viz.charts.text import columned, table, terminal

__all__ = ["Chart", "Point", "Scale", "Series", "columned", "scene", "svg", "table", "terminal"]
