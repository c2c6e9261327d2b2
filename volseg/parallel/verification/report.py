"""Report of ``verify``, printed as a table of modes and compared values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from volseg.parallel.verification.comparison import (
    KINDS,
    TOLERANCE,
    Difference,
    find_kind,
    name_steps,
    order_worst_first,
)

LISTED = 10
"""Differences listed for each mode."""


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """Result of one mode: its differences from the plain network."""

    name: str
    steps: tuple[Difference, ...] = ()
    first: int = 1
    """Number of the first step in ``steps``."""
    message: str = ""
    """Reason of a refusal, of a failure or of a missing comparison; or a remark."""
    outcome: str = ""
    """``refused`` (an error of ours), ``failed`` (any other error) or ``not compared``; empty if it was compared."""
    plain: bool = True
    """Whether the other side is the plain network instead of another run of the same model."""

    @property
    def errors(self) -> dict[str, float]:
        """Largest relative error by name; NaN if the two sides cannot be subtracted."""
        return name_steps([step.errors for step in self.steps], self.first)

    @property
    def reasons(self) -> dict[str, str]:
        """Reason of each NaN error, by name."""
        return name_steps([step.reasons for step in self.steps], self.first)

    @property
    def wrong(self) -> dict[str, float]:
        """Errors above the tolerance, worst first."""
        return order_worst_first(name_steps([step.wrong for step in self.steps], self.first))

    @property
    def status(self) -> str:
        """``equal``, ``different``, ``refused``, ``failed`` or ``not compared``."""
        return self.outcome or ("different" if self.wrong else "equal")


@dataclass(frozen=True)
class Report:
    """Comparison of a network on several devices with the same network on one."""

    shape: tuple[int, ...]
    shards: int
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest relative error over all modes by name: ``output 0``, ``input 0`` (its gradient), ``gradient of ...``,
    ``buffer ...``, ``step of ...``, ``attribute ...``; those of a second step end with ``, step 2``."""
    tolerance: float = TOLERANCE
    modes: tuple[ModeResult, ...] = ()
    notes: tuple[str, ...] = ()
    unit: str = "shards"
    devices: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``equal``, ``different``, or ``not compared`` if no mode could be compared with the plain network.

        An error that is not the typed refusal of volseg counts as a difference.
        """
        if any(mode.status in ("different", "failed") for mode in self.modes):
            return "different"
        return "equal" if any(mode.plain and mode.steps for mode in self.modes) else "not compared"

    @property
    def ok(self) -> bool:
        """Whether the verdict is ``equal``: something was compared, and every error is within its tolerance."""
        return self.verdict == "equal"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an error without a number is None and has a reason."""
        modes = [
            {
                "name": mode.name,
                "status": mode.status,
                "message": mode.message,
                "tolerances": [step.tolerance for step in mode.steps],
                "errors": {name: None if math.isnan(error) else error for name, error in mode.errors.items()},
                "reasons": mode.reasons,
            }
            for mode in self.modes
        ]
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "strategy": "pipeline" if self.unit == "stages" else "spatial",
            "shape": list(self.shape),
            "dtype": "float64",
            "shards": self.shards,
            "devices": list(self.devices),
            "tolerance": self.tolerance,
            "modes": modes,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        words = {"equal": "equal to round-off", "different": "DIFFERENT", "not compared": "NOT COMPARED"}
        lines = [
            f"{self.shards} {self.unit} and one device are {words[self.verdict]} on a volume of {self.shape} (float64):"
        ]
        lines += ["", *self._make_table(), "", *self._count()]
        shared: dict[tuple[str, ...], list[str]] = {}
        for mode in self.modes:
            if mode.wrong:
                shared.setdefault(tuple(_list_names(mode.wrong, mode.reasons)), []).append(mode.name)
        for listed, names in shared.items():
            lines += [f"DIFFERENT in {'; '.join(names)}:", *listed]
        lines += self._collect_messages()
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _make_table(self) -> list[str]:
        """Return one row per mode and step, with one column per kind of compared values."""
        present = {find_kind(name) for mode in self.modes for name in mode.errors}
        kinds = [kind for kind in KINDS if kind in present]
        rows = [["mode", "step", *(KINDS[kind] for kind in kinds)]]
        for mode in self.modes:
            if mode.outcome:
                rows.append([mode.name, mode.outcome])
            for number, step in enumerate(mode.steps, mode.first):
                cells = [_cell(step, kind) for kind in kinds]
                rows.append([mode.name if number == mode.first else "", str(number), *cells])
        full = [row for row in rows if len(row) == len(rows[0])]
        widths = [max(len(row[0]) for row in rows), *(max(len(row[i]) for row in full) for i in range(1, len(rows[0])))]
        return [
            "  ".join([
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)),
            ]).rstrip()
            for row in rows
        ]  # fmt: skip

    def _count(self) -> list[str]:
        """Return the number of compared values, and the largest error."""
        first = next((mode.steps[0].errors for mode in self.modes if mode.plain and mode.steps), {})
        if not first:
            return []
        counts = {KINDS[kind]: sum(find_kind(name) == kind for name in first) for kind in KINDS}
        counts["outputs"] -= "output structure" in first
        told = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
        name, error = next(iter(order_worst_first(self.errors).items()))
        return [f"Compared: {told}.", f"Largest relative error: {_number(error)}{f', {name}' if error else ''}."]

    def _collect_messages(self) -> list[str]:
        """Return refusals, failures and remarks; modes with the same message share a line."""
        shared: dict[tuple[str, str], list[str]] = {}
        for mode in self.modes:
            if mode.message:
                shared.setdefault((mode.outcome or "remark", mode.message), []).append(mode.name)
        return [f"{kind.capitalize()}, {'; '.join(names)}: {text}" for (kind, text), names in shared.items()]


def _cell(step: Difference, kind: str) -> str:
    """Return the largest error of a kind, marked if it is too large."""
    found = {name: error for name, error in step.errors.items() if find_kind(name) == kind}
    if not found:
        return "-"
    worst = next(iter(order_worst_first(found).values()))
    return _number(worst) + ("" if worst <= step.tolerance else " !")


def _number(error: float) -> str:
    if math.isnan(error):
        return "differs"
    return "0" if error == 0 else f"{error:.1e}"


def _list_names(errors: Mapping[str, float], reasons: Mapping[str, str]) -> Sequence[str]:
    lines = []
    for name, error in list(order_worst_first(errors).items())[:LISTED]:
        reason = f": {reasons[name]}" if name in reasons else ""
        lines.append(f"  {_number(error):>9}  {name}{reason}")
    hidden = len(errors) - LISTED
    return [*lines, *([f"  ... and {hidden} more, none of them larger"] if hidden > 0 else [])]
