"""The parts of a report, each made by itself: what a damaged file does to one of them, it does to no other one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from volseg.reporting.content import Block, Section

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
