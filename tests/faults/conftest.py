"""Real nodes in trouble: `proxy` spoils single connections, `hosts` whole networks, and with
`failpoints` a node dies at one exact moment."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "federation")]
