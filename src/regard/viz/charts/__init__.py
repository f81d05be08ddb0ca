"""Line charts: several series of points, as an SVG picture, in a terminal, or as a plain table.

Series differ in colour, marker and dash, and have their names at their right ends. The colours are the palette of Okabe
and Ito, which can be told apart with the common colour vision deficiencies.

    chart = Chart("Quality", "length (words)", "BLEU", (Series.of("lstm", [5, 10], [30, 20]),))
    Path("quality.svg").write_text(svg(chart), encoding="utf-8")
"""

from regard.viz.charts.chart import Chart, Point, Scale, Series
from regard.viz.charts.picture import scene, svg
from regard.viz.charts.text import columned, table, terminal

__all__ = ["Chart", "Point", "Scale", "Series", "columned", "scene", "svg", "table", "terminal"]
