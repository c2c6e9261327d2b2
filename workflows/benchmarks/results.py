"""How a benchmark writes what it measured: with its command, and the machine and libraries it ran on."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from volseg.monitoring.environment import environment


def write_result(path: Path, **content: Any) -> None:
    """Write a result as JSON, whole or not at all: a script writes after each row, and may be killed meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), **content}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
