"""The parts of a report, each made by itself: what a damaged file does to one of them, it does to no other one."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from volseg.commands import spell
from volseg.reporting.content import Block, Commands, Items, ReportContent, Section
from volseg.reporting.words import list_sections, tell_when
from volseg.version import __version__

__all__ = ["Composer"]

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

    def section(
        self,
        title: str,
        make: Callable[[], Sequence[Block]],
        *,
        brief: bool = False,
        only_brief: bool = False,
        warns: bool = False,
    ) -> Section:
        """Return a section, without a block where it has nothing to say."""
        nothing: Sequence[Block] = ()
        blocks = self.attempt(f"The section '{title}'", make, nothing)
        return Section(title=title, blocks=blocks, brief=brief, only_brief=only_brief, warns=warns)

    def finish(
        self,
        folder: Path,
        *,
        title: str,
        subtitle: str,
        state: str,
        headline: Sequence[tuple[str, str]],
        sections: Sequence[Section],
        commands: Sequence[tuple[str, str]],
    ) -> ReportContent:
        """Return the report of a folder: behind the sections what is left out, and what to do next.

        Parameters
        ----------
        folder, title, subtitle, state, headline, sections
            See `ReportContent`.
        commands
            What each does, and its line.
        """
        last = [
            Section(title="Not shown", blocks=[Items(self._missing)] if self._missing else []),
            Section(title="Next", blocks=[Commands([(what, spell(line)) for what, line in commands])]),
        ]
        return ReportContent(
            title=title,
            subtitle=subtitle,
            state=state,
            headline=headline,
            sections=list_sections([*sections, *last]),
            written=f"Written {tell_when(time.time())} by volseg {__version__} from {folder}",
        )
