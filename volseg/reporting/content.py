"""What a report says, apart from how it is written."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from volseg.commands import spell
from volseg.formatting import format_moment
from volseg.version import __version__

__all__ = [
    "Block",
    "Boxes",
    "Chart",
    "Charts",
    "Code",
    "Commands",
    "Composer",
    "Items",
    "Line",
    "NamedValues",
    "Picture",
    "Pictures",
    "ReportContent",
    "Section",
    "Shares",
    "Text",
    "TextTable",
    "list_sections",
    "select_charts",
]


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
    """Rows that stand out."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"{self.caption}: a row has {len(row)} cells under {len(self.header)} heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart, with NaN where it has gaps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    """Number in the palette."""
    dots: bool = False
    """Whether its points are drawn and not joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over the epochs, or over something else."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    over: str = "the epochs"
    counts: bool = True
    """Whether the horizontal axis counts something."""
    log: bool = False
    """Whether the horizontal axis is logarithmic."""

    @property
    def series(self) -> list[Sequence[float]]:
        """The values of each line."""
        return [line.ys for line in self.lines]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """How a metric spreads over cases or trials, a box for each label or choice."""

    title: str
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    """Name of the label or choice; case or trial, and value. Values that are no finite number are counted apart."""
    unit: str = ""

    @property
    def series(self) -> list[Sequence[float]]:
        """The values of each group."""
        return [[value for _, value in cases] for _, cases in self.groups]


@dataclass(frozen=True, slots=True)
class Charts:
    """Small drawings beside each other."""

    charts: Sequence[Chart | Boxes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Parts of a whole, as one bar."""

    title: str
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of a case."""

    title: str
    alt: str
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Pictures below each other, and the colours of what is drawn in them."""

    title: str
    pictures: Sequence[Picture]
    legend: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Code:
    """Text as it stands in a file."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """What may be typed, with what it does."""

    commands: Sequence[tuple[str, str]]


Block = Text | Items | NamedValues | TextTable | Charts | Shares | Pictures | Code | Commands


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]
    brief: bool = False
    """Whether the short form has it too."""
    only_brief: bool = False
    """Whether the page leaves it out, as it shows the same otherwise."""
    warns: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContent:
    """Everything that is said of a run or of a cross-validation."""

    title: str
    subtitle: str
    state: str
    headline: Sequence[tuple[str, str]]
    """What, and how much; the first is the most important."""
    sections: Sequence[Section]
    written: str
    """When, and by which version."""


def select_charts(charts: Sequence[Chart | Boxes], caption: str) -> list[Block]:
    """Return the charts that show different values below a caption; nothing where there is no such chart."""
    shown = [chart for chart in charts if any(len({*filter(math.isfinite, values)}) > 1 for values in chart.series)]
    return [Text(caption), Charts(shown)] if shown else []


def list_sections(sections: Sequence[Section]) -> list[Section]:
    """Return the sections that have something to say."""
    return [section for section in sections if section.blocks]


Part = TypeVar("Part")

FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python raises where a value is of another kind, or of another size, than the one that volseg writes."""


class Composer:
    """Makes parts; one that the files do not give is left out, with its reason.

    Parameters
    ----------
    missing : list of str
        Takes a sentence for each part that is left out.
    """

    def __init__(self, missing: list[str]) -> None:
        self._missing = missing

    def attempt(self, what: str, make: Callable[[], Part], otherwise: Part) -> Part:
        """Return what is made, or ``otherwise``."""
        try:
            return make()
        except FAULTS as fault:
            self._missing.append(
                f"{what} cannot be told: a file of the folder holds what volseg does not write there "
                f"({type(fault).__name__}: {fault})."
            )
            return otherwise

    def section(self, title: str, make: Callable[[], Sequence[Block]], **kind: bool) -> Section:
        """Return a `Section` of a kind, without a block where it has nothing to say."""
        nothing: Sequence[Block] = ()
        blocks = self.attempt(f"The section '{title}'", make, nothing)
        return Section(title=title, blocks=blocks, **kind)

    def finish(
        self, folder: Path, *, sections: Sequence[Section], commands: Sequence[tuple[str, str]], **told: Any
    ) -> ReportContent:
        """Return the report of a folder: behind the sections what is left out, and what to do next.

        Parameters
        ----------
        folder, sections, **told
            See `ReportContent`.
        commands
            What each does, and its line.
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
