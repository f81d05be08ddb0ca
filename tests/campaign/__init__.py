"""A campaign against regard: kills, flipped bits, hostile files, requests and command lines (`make campaign`).

python -m tests.campaign                            everything, about 20 minutes on 2 cores
python -m tests.campaign kills --count 20 --seed 1  one part
python -m tests.campaign fuzz --seconds 60          hostile files, requests and command lines for a minute
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in (TESTS, TESTS / "invariants"):  # where pytest finds the helpers of the tests
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
