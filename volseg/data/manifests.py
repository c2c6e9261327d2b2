"""The manifests of the Decathlon's ten tasks: ``datasets/msd`` in the source tree, beside this file where installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from volseg.config.nearest import did_you_mean
from volseg.errors import DataError

__all__ = ["list_manifests", "read_manifest"]


def list_manifests() -> tuple[str, ...]:
    """Return the names of the tasks, ``Task01_BrainTumour`` first."""
    return tuple(sorted(path.stem for path in _find_folder().glob("*.yaml")))


def read_manifest(name: str) -> Mapping[str, Any]:
    """Return the manifest of a task.

    Parameters
    ----------
    name : str
        Such as ``Task09_Spleen``; also ``9``, its number.

    Raises
    ------
    DataError
        For a task that has none, with the nearest ones that do.
    """
    names = list_manifests()
    if name.isdecimal():
        name = next((known for known in names if known.startswith(f"Task{int(name):02d}_")), name)
    if name not in names:  # a name from outside is looked up, never made a path
        raise DataError(f"no task of the Decathlon is called {name!r}; {did_you_mean(name, names)}")
    return yaml.safe_load((_find_folder() / f"{name}.yaml").read_text(encoding="utf-8"))


def _find_folder() -> Path:
    installed = Path(__file__).with_name("manifests")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "datasets" / "msd"
