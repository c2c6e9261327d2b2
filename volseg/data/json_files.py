"""Read JSON from other programs within bounds.

Python's reader accepts duplicate keys, ``NaN``, integers of thousands of digits, and lists nested as deeply as its
stack. Each of these leads to a wrong value or to an untyped exception later.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from volseg.errors import DataError
from volseg.files import decode_text, read_bytes, require_text
from volseg.formatting import list_duplicates

MOST_BYTES = 1 << 27
MOST_VALUES = 4_000_000
"""A summary of 1,200 cases with 100 labels contains a million values."""

DEEPEST = 100
"""Nested levels of lists and objects."""

SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
"""The escape of a surrogate. A pair of surrogates is a character."""


def read_json(path: Path, kind: str = "JSON", *, has_nan: bool = False) -> Any:
    """Return the values of a JSON file; see `parse_json`. Messages call the file a ``kind``.

    Raises
    ------
    DataError
        If the file cannot be read, `parse_json` refuses it, or it contains a lone surrogate.
    """
    try:
        text = read_bytes(path, MOST_BYTES)
        content = parse_json(text, has_nan=has_nan)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read as {kind}: {fault}") from fault
    if SURROGATE.search(text):  # a lone one cannot be written as UTF-8
        require_text(content, f"a name in {path}", DataError)
    return content


def parse_json(content: bytes | str, *, has_nan: bool = False) -> Any:
    """Return the values of a JSON text.

    Parameters
    ----------
    content : bytes or str
        The text; bytes are UTF-8.
    has_nan : bool
        Whether to read ``NaN`` and ``Infinity``, which are not JSON, as numbers: nnU-Net writes them.

    Raises
    ------
    ValueError
        If the text is not JSON, repeats a key in an object, contains a number that is not finite or an integer of more
        than 64 bits, or has too many values or levels.
    """
    text = content if isinstance(content, str) else decode_text(content)
    most_levels = text.count("[") + text.count("{")
    if most_levels + text.count(",") > MOST_VALUES:
        raise ValueError(f"it contains more than {MOST_VALUES} values")
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
    if most_levels > DEEPEST:
        _require_shallow(found)
    return found


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        raise ValueError(f"the key {list_duplicates(key for key, _ in pairs)[0][:80]!r} occurs twice; keep one")
    return built


def _parse_integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"the number {digits[:40]} needs more than 64 bits")
    return number


def _parse_finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:40]} is not a finite number")
    return number


def _require_shallow(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST + 1):
        branches = [value for value in level if isinstance(value, dict | list)]
        level = [item for one in branches for item in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ValueError(f"it is nested too deeply: more than {DEEPEST} levels")
