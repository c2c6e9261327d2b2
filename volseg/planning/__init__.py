"""Plan a training config from the fingerprint of a data set."""

from volseg.planning.fingerprint import take_fingerprint
from volseg.planning.geometry import PRESETS
from volseg.planning.plan import plan, write_config

__all__ = ["PRESETS", "plan", "take_fingerprint", "write_config"]
