"""Read JSON of anybody's, which may hold anything.

Python's reader takes a key that stands twice, ``NaN``, integers of thousands of digits, and lists that are nested as
deeply as its stack; each of these ends in a wrong value or in another exception further on.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from volseg.errors import DataError
from volseg.files import decode_text, read_bytes, require_text

__all__ = ["parse_json", "read_json"]

MOST_BYTES = 1 << 27
MOST_VALUES = 4_000_000
"""A summary of 1,200 cases with 100 labels holds a million."""

DEEPEST = 100
"""Levels of lists and objects."""

SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
"""How JSON escapes a surrogate, of which two are a letter."""


def read_json(path: Path, kind: str = "JSON", *, has_nan: bool = False) -> Any:
    """Return what a JSON file holds, which should be a ``kind``; see `parse_json`.

    Raises
    ------
    DataError
        The file cannot be read, is no JSON, or holds a text that cannot be written.
    """
    try:
        text = read_bytes(path, MOST_BYTES)
        content = parse_json(text, has_nan=has_nan)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read as {kind}: {fault}") from fault
    if SURROGATE.search(text):  # half of a letter's code, which no file could hold again
        require_text(content, f"a name in {path}", DataError)
    return content


def parse_json(content: bytes | str, *, has_nan: bool = False) -> Any:
    """Return the values of a JSON text in UTF-8.

    Parameters
    ----------
    content : bytes or str
        The text.
    has_nan : bool
        Whether ``NaN`` and ``Infinity``, which are no JSON, are taken for numbers: nnU-Net writes them.

    Raises
    ------
    ValueError
        The text is no JSON, gives a key twice, holds a number that is not finite or an integer of more than 64 bits, or
        holds too many values or levels.
    """
    text = content if isinstance(content, str) else decode_text(content)
    num_begun = text.count("[") + text.count("{")
    if num_begun + text.count(",") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")
    try:
        found = json.loads(
            text,
            object_pairs_hook=_build_object,
            parse_int=_parse_integer,
            parse_float=float if has_nan else _parse_finite,
            parse_constant=float if has_nan else _parse_finite,
        )
    except RecursionError:
        raise ValueError(f"it is nested too deeply: more than {DEEPEST} levels") from None
    if num_begun > DEEPEST:
        _require_shallow(found)
    return found


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        counted = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counted.most_common(1)[0][0][:80]!r} stands twice; keep one")
    return built


def _parse_integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"the number {digits[:40]} needs more than 64 bits")
    return number


def _parse_finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:40]} is no finite number")
    return number


def _require_shallow(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST + 1):
        level = [item for value in level if isinstance(value, dict | list)
                 for item in (value.values() if isinstance(value, dict) else value)]  # fmt: skip
    if level:
        raise ValueError(f"it is nested too deeply: more than {DEEPEST} levels")
