"""Where a component of the user's own came from: what a run writes down of it, to find it again."""

from dataclasses import asdict, dataclass
from typing import Any

from volseg.config.records import read_record
from volseg.errors import DataError

__all__ = ["EXECUTED", "Source"]

EXECUTED = "__volseg_executed__"
"""Attribute of a module that was run from bytes: these bytes, whatever its file holds by now."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An installed package, a file that the command line named, or a plain call in somebody's program."""

    package: str | None = None
    """Name of the distribution whose entry point it is."""
    version: str | None = None
    """Of the package."""
    file: str | None = None
    """Path of the file that was named by ``--components``."""
    sha256: str | None = None
    """Of the file's bytes, when it was run."""
    module: str | None = None
    """Module of the program that registered it."""

    def __str__(self) -> str:
        if self.package is not None:
            return f"package {self.package} {self.version}"
        if self.file is not None:
            return f"{self.file}, sha256 {(self.sha256 or '')[:12]}"
        return f"a call of volseg.register in {self.module}"

    def as_json(self) -> dict[str, str]:
        """Return what is known as plain values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Any, file: object) -> "Source":
        """Read what `as_json` gave.

        Raises
        ------
        DataError
            Names ``file`` if it holds something else.
        """
        try:
            return read_record(cls, content)
        except ValueError as fault:
            raise DataError(f"{file} should say where each component came from ({fault}); restore it") from fault
