"""A diagnosis as a whole: facts, what they mean, and how both are told."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from volseg.diagnosis.checks import check
from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import LEVELS, Level, MachineFinding
from volseg.diagnosis.gathering import GATHERERS, Gatherer, gather
from volseg.version import __version__

__all__ = ["SCHEMA_VERSION", "Diagnosis", "diagnose"]

SCHEMA_VERSION = 1
"""Of the JSON: raised where a key goes or changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found of this machine."""

    findings: tuple[MachineFinding, ...]
    facts: Facts
    seconds: float
    """That it took."""

    @property
    def level(self) -> Level:
        """That of the worst finding."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def is_sound(self) -> bool:
        """Whether nothing stops a training."""
        return self.level != "error"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "schema": SCHEMA_VERSION,
            "volseg": __version__,
            "time": time.time(),
            "seconds": round(self.seconds, 3),
            "level": self.level,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": TypeAdapter(Facts).dump_python(self.facts, mode="json"),
        }


def diagnose(
    *,
    quick: bool = False,
    cache: str | Path | None = None,
    runs: str | Path | None = None,
    gatherers: Sequence[Gatherer] = GATHERERS,
) -> Diagnosis:
    """Look at this machine.

    Parameters
    ----------
    quick
        Leave out what computes: sums between processes, copies between GPUs, a kernel, imports.
    cache, runs
        Folders to look at, if not where volseg writes by itself.
    gatherers
        Who is asked.
    """
    begun = time.perf_counter()
    places = {role: Path(folder) for role, folder in (("cache", cache), ("runs", runs)) if folder is not None}
    facts = gather([one for one in gatherers if one.is_quick or not quick], folders=places)
    return Diagnosis(findings=tuple(check(facts)), facts=facts, seconds=time.perf_counter() - begun)
