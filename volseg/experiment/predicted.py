"""What became of the cases of a prediction: for the eye, and for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from volseg.errors import DataError

__all__ = ["CaseResult", "Predicted"]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What became of one case."""

    case: str
    state: Literal["predicted", "there before", "failed"]
    file: Path | None = None
    """The label map; None where the case failed."""
    error: str = ""
    """Class of what went wrong."""
    message: str = ""
    """What went wrong, with its remedy."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """See `volseg.inference.overlapped.CaseOutcome`; of a case that was there before, none."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What became of all cases, in the order in which they were named."""

    folder: Path
    cases: tuple[CaseResult, ...]

    @property
    def label_maps(self) -> dict[str, Path]:
        """Case id to the file of its label map, written now or before."""
        return {case.case: case.file for case in self.cases if case.file is not None}

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases without a label map."""
        return tuple(case for case in self.cases if case.file is None)

    def require_all(self) -> dict[str, Path]:
        """Return `label_maps`, if every case has one.

        Raises
        ------
        DataError
            Names every case that failed, and why.
        """
        if self.failures:
            lines = "\n".join(f"  {case.case}: {case.message}" for case in self.failures)
            raise DataError(f"{len(self.failures)} case(s) cannot be used:\n{lines}\nmend them, or leave them out")
        return self.label_maps

    def table(self) -> str:
        """Return a line per case, and one that counts them."""
        rows = [
            (case.case, case.state, _add_up(case.seconds), str(case.file or f"{case.error}: {case.message}"))
            for case in self.cases
        ]
        names = ("case", "result", "seconds", "label map, or why there is none")
        widths = [max(len(row[column]) for row in [names, *rows]) for column in range(3)]
        head, *body = [
            f"| {name:<{widths[0]}} | {state:<{widths[1]}} | {seconds:>{widths[2]}} | {said} |"
            for name, state, seconds, said in [names, *rows]
        ]
        rule = "| " + " | ".join("-" * width for width in (*widths, len(names[3]))) + " |"
        told = ", ".join(f"{count} {state}" for state, count in self._count().items() if count)
        return "\n".join([head, rule, *body, "", f"{len(self.cases)} case(s) in {self.folder}: {told}"])

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        cases = [{**asdict(case), "file": case.file and str(case.file)} for case in self.cases]
        return {"folder": str(self.folder), "counts": self._count(), "cases": cases}

    def _count(self) -> dict[str, int]:
        states = ("predicted", "there before", "failed")
        return {state: sum(case.state == state for case in self.cases) for state in states}


def _add_up(seconds: Mapping[str, float]) -> str:
    return f"{sum(seconds.values()):.1f}" if seconds else ""
