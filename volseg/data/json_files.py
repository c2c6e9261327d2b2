"""Read a JSON file of somebody's, which may hold anything."""

import json
from pathlib import Path
from typing import Any

from volseg.errors import DataError

__all__ = ["read_json"]


def read_json(path: Path, kind: str = "JSON") -> Any:
    """Return what a JSON file holds, which should be a ``kind``.

    Raises
    ------
    DataError
        The file cannot be read, is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read as {kind}: {fault}") from fault
    except RecursionError:
        raise DataError(f"{path} cannot be read as {kind}: it is nested too deeply") from None
