"""Plan a training config from the fingerprint of a data set."""

from volseg.planning.fingerprint import (
    CaseSizes,
    Fingerprint,
    Intensities,
    keep_fingerprint,
    load_fingerprint,
    take_fingerprint,
)
from volseg.planning.geometry import PRESETS, Like
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

__all__ = [
    "CASCADE",
    "DEFAULT_MEMORY",
    "PRESETS",
    "CaseSizes",
    "Fingerprint",
    "Intensities",
    "Like",
    "Plan",
    "choose_name",
    "keep_fingerprint",
    "load_fingerprint",
    "name_first_stage",
    "parse_memory",
    "plan",
    "take_fingerprint",
    "write_config",
]
