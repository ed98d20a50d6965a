"""Real nodes on bad networks: `proxy` spoils single connections, `hosts` whole networks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "federation")]
