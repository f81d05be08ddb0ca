"""Views of a trace or a run, each as one `Picture`: a file, lines in a terminal, or numbers.

overlay     attention over the input: an image, a spectrogram, an episode, a graph
align       cross-attention: which source words each output word attended to
maps        one attention map of any part
heads       thumbnails of all heads
walk        from text to the next token, stage by stage
gates       the gates of recurrent layers, token by token
positions   the position encoding
curves      training curves
decisions   which past steps each decision attends to
returns     achieved over requested returns
"""

from regard.viz.views.choice import MapChoice
from regard.viz.views.decisions import decisions, returns_chart
from regard.viz.views.files import FILES
from regard.viz.views.picture import Picture
from regard.viz.views.views import VIEWS, curves, draw, fitting, positions

__all__ = [
    "FILES",
    "VIEWS",
    "MapChoice",
    "Picture",
    "curves",
    "decisions",
    "draw",
    "fitting",
    "positions",
    "returns_chart",
]
