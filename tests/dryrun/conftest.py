"""The layouts of the parity tests serve here too, and the rows of the accuracy tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / part) for part in ("parity", "accuracy")]
