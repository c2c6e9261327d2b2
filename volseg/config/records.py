"""Record the origin of custom components, and read dataclasses from JSON with strict types."""

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from volseg.errors import DataError

# A plain `TypeAdapter` of a dataclass accepts ``"3"`` as a number, and ignores unknown fields.


Record = TypeVar("Record")

EXACT = ConfigDict(extra="forbid", strict=True)


def read_record(kind: type[Record], content: Any) -> Record:
    """Return a dataclass built from parsed JSON, nested dataclasses included.

    Raises
    ------
    ValueError
        If ``content`` does not fit; the message has one line.

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
    # A dataclass inherits the settings of the type around it; pydantic refuses settings for the dataclass itself.
    # Strict mode accepts a list for a tuple, and an object for a dataclass, only in JSON text.
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
"""Attribute of a module that was executed from bytes: these bytes, since the file may change later."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a component: an installed package, a file of ``--components``, or a call of ``volseg.register``."""

    package: str | None = None
    """Name of the distribution that has the entry point."""
    version: str | None = None
    """Version of the package."""
    file: str | None = None
    """Path of the file of ``--components``."""
    sha256: str | None = None
    """SHA-256 of the file's bytes when it was executed."""
    module: str | None = None
    """Module of the program that registered the component."""

    def __str__(self) -> str:
        if self.package is not None:
            return f"package {self.package} {self.version}"
        if self.file is not None:
            return f"{self.file}, sha256 {(self.sha256 or '')[:12]}"
        return f"a call of volseg.register in {self.module}"

    def as_json(self) -> dict[str, str]:
        """Return the known fields as plain values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Any, file: object) -> "Source":
        """Return the source that `as_json` wrote.

        Raises
        ------
        DataError
            If ``content`` is something else; names ``file``.
        """
        try:
            return read_record(cls, content)
        except ValueError as fault:
            raise DataError(f"{file} should say where each component came from ({fault}); restore it") from fault
