"""Where a component of the user's own came from, and dataclasses that were written down as JSON, read back."""

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from volseg.errors import DataError

__all__ = ["EXECUTED", "Source", "read_record"]

# Dataclasses that were written down as JSON, read back: every field of its own type, and none that is not known.
#
# A plain `TypeAdapter` of a dataclass takes ``"3"`` for a number, and passes over fields that it does not know.


Record = TypeVar("Record")

EXACT = ConfigDict(extra="forbid", strict=True)


def read_record(kind: type[Record], content: Any) -> Record:
    """Return the dataclass whose fields, and those of the dataclasses in it, ``content`` has as JSON has them.

    Raises
    ------
    ValueError
        In one line, if ``content`` is something else.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Patch:
    ...     size: tuple[int, ...]
    >>> read_record(Patch, {"size": [32, 32, 16]})
    Patch(size=(32, 32, 16))
    >>> read_record(Patch, {"size": [32, "32", 16]})
    Traceback (most recent call last):
    ...
    ValueError: size.1: Input should be a valid integer, got '32'
    """
    # A dataclass takes the settings of what it lies in, and cannot be given any itself. Only of JSON's text are a
    # list for a tuple, and an object for a dataclass, exact.
    known = TypeAdapter(tuple[kind], config=EXACT)  # type: ignore[valid-type]
    try:
        (found,) = known.validate_json(json.dumps([content]))
    except ValidationError as fault:
        errors = fault.errors(include_url=False)
        places = [".".join(map(str, error["loc"][1:])) or kind.__name__ for error in errors]
        told = (f"{place}: {error['msg']}, got {error['input']!r}" for place, error in zip(places, errors, strict=True))
        raise ValueError("; ".join(told)) from None
    return found


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
