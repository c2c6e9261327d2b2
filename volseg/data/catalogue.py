"""The public data sets that volseg knows, from the manifests of ``datasets/msd``, which the wheel includes.

A manifest has the URL of a data set, its checksum, channels, labels, sizes and published results;
``datasets/README.md`` gives the source of each number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from volseg.config.nearest import did_you_mean
from volseg.config.yaml_values import read_yaml
from volseg.errors import DataError

__all__ = ["PublicTask", "find_public_task", "list_public_tasks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicTask:
    """A data set that can be downloaded."""

    name: str
    url: str
    """URL of a tar archive."""
    md5: str
    licence: str
    modalities: tuple[str, ...]
    labels: Mapping[int, str]
    num_training: int
    num_test: int
    manifest: Mapping[str, Any]
    """Whole content of the manifest."""


def list_public_tasks() -> list[PublicTask]:
    """Return the tasks of all manifests, sorted by name."""
    return [_read(path) for path in sorted(_find_manifests().glob("*.yaml"))]


def find_public_task(name: str) -> PublicTask:
    """Return the task with a name, or part of it: ``Task09_Spleen``, ``Task09``, ``9``, ``spleen``.

    Raises
    ------
    DataError
        If there is no such task, or several.
    """
    tasks = {task.name: task for task in list_public_tasks()}
    wanted = name.strip().casefold()
    found = [known for known in tasks if wanted in _name_shortly(known)]
    if len(found) != 1:
        raise DataError(f"no public task is called {name!r}; {did_you_mean(name, tasks)}")
    return tasks[found[0]]


def _name_shortly(name: str) -> set[str]:
    number, _, organ = name.casefold().partition("_")
    digits = number.removeprefix("task")
    return {name.casefold(), number, organ, digits, digits.lstrip("0")}


@cache  # a training requests its task's manifest four times
def _read(path: Path) -> PublicTask:
    manifest = read_yaml(path, str(path))
    return TypeAdapter(PublicTask).validate_python({**manifest, "manifest": manifest})


def _find_manifests() -> Path:
    """Return the folder of manifests: beside this file in an installation, else in the source tree."""
    installed = Path(__file__).with_name("manifests")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "datasets" / "msd"
