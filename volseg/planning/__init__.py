"""From the fingerprint of a data set to a planned config."""

from volseg.planning.facts import CaseFacts, Fingerprint, Intensities
from volseg.planning.geometry import PRESETS, Geometry
from volseg.planning.plan import DEFAULT_MEMORY, Plan, plan
from volseg.planning.published import published_fingerprint
from volseg.planning.settings import Setting
from volseg.planning.writing import write_config

__all__ = [
    "DEFAULT_MEMORY",
    "PRESETS",
    "CaseFacts",
    "Fingerprint",
    "Geometry",
    "Intensities",
    "Plan",
    "Setting",
    "plan",
    "published_fingerprint",
    "write_config",
]
