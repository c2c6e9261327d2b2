"""The old place of ``volseg.parallel.verify``, which compares every strategy and not the spatial one alone."""

from volseg.parallel.comparison import compare, default_objective
from volseg.parallel.verify import TOLERANCE, verify
from volseg.parallel.verify_report import Report

__all__ = ["TOLERANCE", "Report", "compare", "default_objective", "verify"]
