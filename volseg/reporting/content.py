"""Define the content of a report, independent of its file format."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from volseg.commands import spell
from volseg.formatting import format_moment
from volseg.version import __version__


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class NamedValues:
    """Names and values."""

    facts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """Rows of text; the first cell of each row names it."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sortable: bool = False
    bold: frozenset[int] = frozenset()
    """Indices of the rows in bold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart; NaN makes a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    """Index of the colour in the palette."""
    dots: bool = False
    """Whether to draw points instead of a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of lines over the epochs, or over another quantity."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    over: str = "the epochs"
    counts: bool = True
    """Whether the horizontal axis has whole numbers."""
    log: bool = False
    """Whether the horizontal axis is logarithmic."""

    @property
    def series(self) -> list[Sequence[float]]:
        """Values of each line."""
        return [line.ys for line in self.lines]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """A box plot of a metric over cases or trials, with one box per label or choice."""

    title: str
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    """Name of the label or choice, and pairs of case or trial and value. Values that are not finite get a count."""
    unit: str = ""

    @property
    def series(self) -> list[Sequence[float]]:
        """Values of each group."""
        return [[value for _, value in cases] for _, cases in self.groups]


@dataclass(frozen=True, slots=True)
class Charts:
    """Small charts side by side."""

    charts: Sequence[Chart | Boxes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of a case."""

    title: str
    alt: str
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Pictures, one below the other, with a legend of their colours."""

    title: str
    pictures: Sequence[Picture]
    legend: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Code:
    """Text of a file, verbatim."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """Pairs of a purpose and a command line."""

    commands: Sequence[tuple[str, str]]


Block = Text | Items | NamedValues | TextTable | Charts | Pictures | Code | Commands


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block]
    brief: bool = False
    """Whether the short form includes the section."""
    only_brief: bool = False
    """Whether only the short form includes the section; the page shows its content in another section."""
    warns: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContent:
    """Content of the report of a run, a cross-validation or a search."""

    title: str
    subtitle: str
    state: str
    headline: Sequence[tuple[str, str]]
    """Names and values; the first is the most important."""
    sections: Sequence[Section]
    written: str
    """Time and version of volseg that wrote the report."""


def select_charts(charts: Sequence[Chart | Boxes], caption: str) -> list[Block]:
    """Return a caption and the charts whose values vary; an empty list if no chart has such values."""
    shown = [chart for chart in charts if any(len({*filter(math.isfinite, values)}) > 1 for values in chart.series)]
    return [Text(caption), Charts(shown)] if shown else []


def list_sections(sections: Sequence[Section]) -> list[Section]:
    """Return the sections that have blocks."""
    return [section for section in sections if section.blocks]


Part = TypeVar("Part")

FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Python exceptions caused by values whose type or size differs from what volseg writes."""


class Composer:
    """Make the parts of a report; leave out a part if its files are faulty, and record the reason.

    Parameters
    ----------
    missing : list of str
        Receives a sentence for each part left out.
    """

    def __init__(self, missing: list[str]) -> None:
        self._missing = missing

    def attempt(self, what: str, make: Callable[[], Part], otherwise: Part) -> Part:
        """Return the result of ``make``, or ``otherwise`` if it raises one of `FAULTS`."""
        try:
            return make()
        except FAULTS as fault:
            self._missing.append(
                f"The report lacks {what}: a file in the folder differs from what volseg writes there "
                f"({type(fault).__name__}: {fault})."
            )
            return otherwise

    def section(self, title: str, make: Callable[[], Sequence[Block]], **kind: bool) -> Section:
        """Return a `Section` with the blocks of ``make``; without blocks if it fails."""
        nothing: Sequence[Block] = ()
        blocks = self.attempt(f"the section '{title}'", make, nothing)
        return Section(title=title, blocks=blocks, **kind)

    def finish(
        self, folder: Path, *, sections: Sequence[Section], commands: Sequence[tuple[str, str]], **told: Any
    ) -> ReportContent:
        """Return the report of a folder; the last sections list parts left out and next commands.

        Parameters
        ----------
        folder, sections, **told
            See `ReportContent`.
        commands
            Purpose and command line of each command.
        """
        last = [
            Section(title="Not shown", blocks=[Items(self._missing)] if self._missing else []),
            Section(title="Next", blocks=[Commands([(what, spell(line)) for what, line in commands])]),
        ]
        return ReportContent(
            sections=list_sections([*sections, *last]),
            written=f"Written {format_moment(time.time())} by volseg {__version__} from {folder}",
            **told,
        )
