"""Report of ``verify``, printed as one line per mode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from volseg.parallel.verification.comparison import Difference, name_steps, order_worst_first

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
    """Errors above the tolerance, worst first."""
    message: str = ""
    """Reason of a refusal, of a failure or of a missing comparison; or a remark."""
    outcome: str = ""
    """``refused`` (an error of ours), ``failed`` (any other error) or ``not compared``; empty if it was compared."""

    @classmethod
    def from_steps(cls, name: str, steps: Sequence[Difference], first: int = 1, **more: Any) -> "ModeResult":
        """Join the differences of consecutive steps, the first of which has the number ``first``."""
        return cls(
            name=name,
            errors=name_steps([step.errors for step in steps], first),
            reasons=name_steps([step.reasons for step in steps], first),
            wrong=order_worst_first(name_steps([step.wrong for step in steps], first)),
            **more,
        )

    @property
    def status(self) -> str:
        """``equal``, ``different``, ``refused``, ``failed`` or ``not compared``."""
        return self.outcome or ("different" if self.wrong else "equal")

    def describe(self) -> str:
        """Return the largest differences, or the largest error of a mode without differences, and the message."""
        if self.outcome:
            return f"{self.outcome}: {self.message}"
        listed = list(self.wrong or order_worst_first(self.errors))[: LISTED if self.wrong else 1]
        parts = [
            f"{_number(self.errors[name])} {': '.join([name, *filter(None, [self.reasons.get(name)])])}"
            for name in listed
            if self.errors[name]
        ]
        more = [f"and {len(self.wrong) - LISTED} more"] if len(self.wrong) > LISTED else []
        return "; ".join(
            [*(["DIFFERENT"] if self.wrong else []), *(parts or ["0"]), *more, *filter(None, [self.message])]
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Comparison of a network on several devices with the same network on one."""

    shape: tuple[int, ...]
    shards: int
    """Number of shards or stages."""
    strategy: str = "spatial"
    tolerance: float
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
            for name, error in mode.errors.items():
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
                "errors": {name: None if math.isnan(error) else error for name, error in mode.errors.items()},
                "reasons": dict(mode.reasons),
            }
            for mode in self.modes
        ]
        return {**vars(self), "ok": self.ok, "verdict": self.verdict, "dtype": "float64", "modes": modes}

    def __str__(self) -> str:
        words = {"equal": "equal to round-off", "different": "DIFFERENT", "not compared": "NOT COMPARED"}
        parts = f"{self.shards} {'stages' if self.strategy == 'pipeline' else 'shards'}"
        width = max((len(mode.name) for mode in self.modes), default=0)
        return "\n".join([
            f"{parts} and one device are {words[self.verdict]} on a volume of {self.shape} (float64).",
            "Largest relative errors:",
            "",
            *(f"{mode.name.ljust(width)}  {mode.describe()}" for mode in self.modes),
            *(f"Note: {note}" for note in self.notes),
        ])  # fmt: skip


def _number(error: float) -> str:
    if math.isnan(error):
        return "differs:"
    return "0" if error == 0 else f"{error:.1e}"
