"""Plan a training config from the fingerprint of a data set."""

from volseg.planning.fingerprint import (
    CaseSizes,
    Fingerprint,
    Intensities,
    Taken,
    keep_fingerprint,
    load_fingerprint,
    published_fingerprint,
    take_fingerprint,
)
from volseg.planning.geometry import PRESETS, Geometry, Like
from volseg.planning.plan import (
    CASCADE,
    DEFAULT_MEMORY,
    Plan,
    choose_name,
    name_first_stage,
    parse_memory,
    plan,
    write_config,
)
from volseg.planning.settings import Setting

__all__ = [
    "CASCADE",
    "DEFAULT_MEMORY",
    "PRESETS",
    "CaseSizes",
    "Fingerprint",
    "Geometry",
    "Intensities",
    "Like",
    "Plan",
    "Setting",
    "Taken",
    "choose_name",
    "keep_fingerprint",
    "load_fingerprint",
    "name_first_stage",
    "parse_memory",
    "plan",
    "published_fingerprint",
    "take_fingerprint",
    "write_config",
]
