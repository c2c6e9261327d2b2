"""Read a JSON file of somebody's, which may hold anything."""

import json
import re
from pathlib import Path
from typing import Any

from volseg.errors import DataError
from volseg.files import require_text

__all__ = ["read_json"]

SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
"""How JSON escapes a surrogate, of which two are a letter."""


def read_json(path: Path, kind: str = "JSON") -> Any:
    """Return what a JSON file holds, which should be a ``kind``.

    Raises
    ------
    DataError
        The file cannot be read, is no JSON, or is nested too deeply.
    ConfigError
        It holds a text that cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read as {kind}: {fault}") from fault
    except RecursionError:
        raise DataError(f"{path} cannot be read as {kind}: it is nested too deeply") from None
    if SURROGATE.search(text):  # half of a letter's code, which no file could hold again
        require_text(content, f"a name in {path}")
    return content
