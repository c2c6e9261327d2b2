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

LISTED = 5
"""Differences listed for each mode."""


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """Result of one mode: its differences from the plain network."""

    name: str
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest relative error by name; NaN if the two sides cannot be subtracted."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reason of each NaN error, by name."""
    wrong: Mapping[str, float] = field(default_factory=dict)
    """Errors above the tolerance of their step, worst first."""
    tolerances: tuple[float, ...] = ()
    """Tolerance of each compared step."""
    message: str = ""
    """Reason of a refusal, of a failure or of a missing comparison; or a remark."""
    outcome: str = ""
    """``refused`` (an error of ours), ``failed`` (any other error) or ``not compared``; empty if it was compared."""
    plain: bool = True
    """Whether the other side is the plain network instead of another run of the same model."""

    @classmethod
    def from_steps(cls, name: str, steps: Sequence[Difference], first: int = 1, **more: Any) -> "ModeResult":
        """Join the differences of consecutive steps, the first of which has the number ``first``."""
        return cls(
            name=name,
            errors=name_steps([step.errors for step in steps], first),
            reasons=name_steps([step.reasons for step in steps], first),
            wrong=order_worst_first(name_steps([step.wrong for step in steps], first)),
            tolerances=tuple(step.tolerance for step in steps),
            **more,
        )

    @property
    def status(self) -> str:
        """``equal``, ``different``, ``refused``, ``failed`` or ``not compared``."""
        return self.outcome or ("different" if self.wrong else "equal")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Comparison of a network on several devices with the same network on one."""

    shape: tuple[int, ...]
    shards: int
    """Number of shards or stages."""
    strategy: str = "spatial"
    tolerance: float = TOLERANCE
    modes: tuple[ModeResult, ...] = ()
    notes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Largest relative error over all modes by name.

        Names are ``output 0``, ``input 0`` (its gradient), ``gradient of ...``, ``buffer ...``, ``step of ...`` and
        ``attribute ...``; those of a second step end with ``, step 2``.
        """
        found: dict[str, float] = {}
        for mode in self.modes:
            for name, error in mode.errors.items() if mode.plain else ():
                found[name] = max(error, found.get(name, 0.0), key=lambda value: (math.isnan(value), value))
        return found

    @property
    def verdict(self) -> str:
        """``equal``, ``different``, or ``not compared`` if no mode could be compared with the plain network.

        An error that is not the typed refusal of volseg counts as a difference.
        """
        if any(mode.status in ("different", "failed") for mode in self.modes):
            return "different"
        return "equal" if self.errors else "not compared"

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
                "tolerances": list(mode.tolerances),
                "errors": {name: None if math.isnan(error) else error for name, error in mode.errors.items()},
                "reasons": dict(mode.reasons),
            }
            for mode in self.modes
        ]
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "strategy": self.strategy,
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
        parts = f"{self.shards} {'stages' if self.strategy == 'pipeline' else 'shards'}"
        lines = [
            f"{parts} and one device are {words[self.verdict]} on a volume of {self.shape} (float64):",
            *("", *self._make_table(), ""),
        ]
        for name, error in list(order_worst_first(self.errors).items())[:1]:
            lines.append(f"Largest relative error: {_number(error)}{f', {name}' if error else ''}.")
        for mode in self.modes:
            if mode.wrong:
                lines += [f"DIFFERENT in {mode.name}:", *_list_worst(mode)]
            if mode.message:
                lines.append(f"{(mode.outcome or 'remark').capitalize()}, {mode.name}: {mode.message}")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _make_table(self) -> list[str]:
        """Return one row per mode, with one column per kind of compared values."""
        kinds = [kind for kind in KINDS if any(find_kind(name) == kind for mode in self.modes for name in mode.errors)]
        rows = [["mode", *(KINDS[kind] for kind in kinds)]]
        rows += [[mode.name, *(_cell(mode, kind) for kind in kinds)] for mode in self.modes if not mode.outcome]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        return [
            "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))])
            for row in rows
        ]


def _cell(mode: ModeResult, kind: str) -> str:
    """Return the largest error of a kind, marked if one of them is too large."""
    found = order_worst_first({name: error for name, error in mode.errors.items() if find_kind(name) == kind})
    if not found:
        return "-"
    return _number(next(iter(found.values()))) + (" !" if found.keys() & mode.wrong.keys() else "")


def _number(error: float) -> str:
    if math.isnan(error):
        return "differs"
    return "0" if error == 0 else f"{error:.1e}"


def _list_worst(mode: ModeResult) -> list[str]:
    """Return the largest differences of a mode, one per line."""
    worst = list(mode.wrong.items())[:LISTED]
    lines = [
        f"  {_number(error):>9}  {name}{f': {mode.reasons[name]}' if name in mode.reasons else ''}"
        for name, error in worst
    ]
    hidden = len(mode.wrong) - len(worst)
    return [*lines, *([f"  ... and {hidden} more, none of them larger"] if hidden else [])]
