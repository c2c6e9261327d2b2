"""A diagnosis in a terminal: what is well in a line each, what is wrong at length, the worst last, where one looks."""

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from volseg.diagnosis.doctor import Diagnosis
from volseg.diagnosis.findings import MachineFinding
from volseg.streams import make_printable

__all__ = ["show_diagnosis"]

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
MARKS = {"ok": ("✓", "ok"), "note": ("•", "note"), "warning": ("!", "warning"), "error": ("✗", "ERROR")}
"""Where the terminal has these letters, and where not."""


def show_diagnosis(diagnosis: Diagnosis, *, file: TextIO | None = None, width: int | None = None) -> None:
    """Print findings: what is well, then notes, warnings and errors with their remedies, then how many there are."""
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
    well = f"{len(by_level['ok'])} checks are well"
    style = STYLES[diagnosis.level]
    console.print(Text(f"{', '.join([*counts, well])} ({diagnosis.seconds:.0f} s)", style))


def _describe(finding: MachineFinding) -> Text:
    """Return what was found; where it is not well also why it matters, and what to type."""
    text = Text(make_printable(finding.found))
    if finding.why:
        text.append(f"\n{make_printable(finding.why)}", "dim")
    if finding.remedy:
        text.append("\nmend: ", "dim").append(make_printable(finding.remedy), "bold")
    return text
