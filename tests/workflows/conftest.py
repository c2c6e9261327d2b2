"""Scripts of the benchmarks and of data sets are imported by their names."""

import sys

from documented import ROOT

sys.path[:0] = [str(ROOT / folder) for folder in ("workflows/benchmarks", "workflows", "datasets")]
