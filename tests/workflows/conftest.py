"""Import scripts of the benchmarks and data sets by name."""

import sys

from documented import ROOT

sys.path[:0] = [str(ROOT / folder) for folder in ("workflows/benchmarks", "workflows", "datasets")]
