"""Diagnose this machine: gather facts, check them, and print the findings."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from volseg.diagnosis.checks import check
from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import LEVELS, Level, MachineFinding
from volseg.diagnosis.gathering import GATHERERS, Gatherer, gather
from volseg.streams import make_printable
from volseg.version import __version__

SCHEMA_VERSION = 1
"""Version of the JSON: raised when a key disappears or changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings and facts of this machine."""

    findings: tuple[MachineFinding, ...]
    facts: Facts
    seconds: float
    """Duration of the diagnosis."""

    @property
    def level(self) -> Level:
        """Level of the worst finding."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def is_sound(self) -> bool:
        """Whether nothing stops a training."""
        return self.level != "error"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain values."""
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
    """Gather facts of this machine and check them.

    Parameters
    ----------
    quick
        Skip trials: sums between processes, copies between GPUs, a kernel, imports.
    cache, runs
        Folders to check instead of volseg's defaults.
    gatherers
        Gatherers to run.
    """
    begun = time.perf_counter()
    places = {role: Path(folder) for role, folder in (("cache", cache), ("runs", runs)) if folder is not None}
    facts = gather([one for one in gatherers if one.is_quick or not quick], folders=places)
    return Diagnosis(findings=tuple(check(facts)), facts=facts, seconds=time.perf_counter() - begun)


# A diagnosis in a terminal: one line per passed check, details for faults, the worst last, next to the prompt.


STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
MARKS = {"ok": ("✓", "ok"), "note": ("•", "note"), "warning": ("!", "warning"), "error": ("✗", "ERROR")}
"""Marks for terminals with and without Unicode."""


def show_diagnosis(diagnosis: Diagnosis, *, file: TextIO | None = None, width: int | None = None) -> None:
    """Print findings: passed checks, then notes, warnings and errors with their remedies, then their numbers."""
    output = file or sys.stdout
    console = Console(file=output, width=width, highlight=False)
    is_plain = "utf" not in (getattr(output, "encoding", None) or "utf-8").lower()
    by_level = {level: [one for one in diagnosis.findings if one.level == level] for level in MARKS}
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for level, findings in by_level.items():
        for finding in findings:
            table.add_row(Text(MARKS[level][is_plain], STYLES[level]), finding.check, _describe(finding))
    console.print(table)
    found = {level: len(by_level[level]) for level in ("error", "warning", "note")}
    counts = [f"{number} {level}{'' if number == 1 else 's'}" for level, number in found.items()]
    well = f"{len(by_level['ok'])} checks passed"
    style = STYLES[diagnosis.level]
    console.print(Text(f"{', '.join([*counts, well])} ({diagnosis.seconds:.0f} s)", style))


def _describe(finding: MachineFinding) -> Text:
    """Return the text of a finding; for a fault also why it matters, and the remedy."""
    text = Text(make_printable(finding.found))
    if finding.why:
        text.append(f"\n{make_printable(finding.why)}", "dim")
    if finding.remedy:
        text.append("\nfix: ", "dim").append(make_printable(finding.remedy), "bold")
    return text
