"""Dataclasses that were written down as JSON, read back: every field of its own type, and none that is not known.

A plain `TypeAdapter` of a dataclass takes ``"3"`` for a number, and passes over fields that it does not know.
"""

import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

__all__ = ["read_record"]

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
