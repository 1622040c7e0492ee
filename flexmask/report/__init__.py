"""Reports about masks.

Takes masks and lengths; gives `Stats` (cells, blocks, bytes), `Explanation` (meaning and lowering in words) and `Difference`
(the cells that only one of two masks shows), in memory that follows the key intervals.
"""

from flexmask.report.compare import Difference
from flexmask.report.explain import CellReason, Explanation
from flexmask.report.stats import Stats

__all__ = ["CellReason", "Difference", "Explanation", "Stats"]
