"""What there is to see of a trace or a run, each view as one `Picture`: a file, lines in a terminal, or numbers.

align       where each output word looked in the source
maps        one attention of any part
heads       every head of every layer, small, side by side
walk        from text to the next token, step by step
gates       what recurrent and gated layers let through, token by token
positions   the vectors that say where a token stands
curves      how training went
"""

from regard.viz.views.choice import MapChoice
from regard.viz.views.files import FILES
from regard.viz.views.picture import Picture
from regard.viz.views.views import VIEWS, curves, draw, fitting, positions

__all__ = ["FILES", "VIEWS", "MapChoice", "Picture", "curves", "draw", "fitting", "positions"]
