"""Look up the configs that come with volseg, and the public data sets described by the manifests in ``datasets/msd``.

Both are found in an installation and in a source tree. A manifest contains the URL of a data set, its checksum,
channels, labels, sizes and published results; ``datasets/README.md`` gives the source of each number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from volseg.commands import spell
from volseg.config.nearest import did_you_mean
from volseg.config.yaml_values import read_yaml
from volseg.errors import ConfigError, DataError
from volseg.formatting import align_columns


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
    """Complete content of the manifest."""


def list_public_tasks() -> list[PublicTask]:
    """Return the tasks of all manifests, sorted by name."""
    return [_read(path) for path in sorted(_find_manifests().glob("*.yaml"))]


def get_public_task(name: str) -> PublicTask:
    """Return the task with a full or short name: ``Task09_Spleen``, ``Task9``, ``9``, ``spleen``.

    Raises
    ------
    DataError
        If no task, or more than one, has the name.
    """
    tasks = {task.name: task for task in list_public_tasks()}
    wanted = name.strip().casefold()
    found = [known for known in tasks if wanted in _name_shortly(known)]
    if len(found) != 1:
        raise DataError(f"no public task is called {name!r}; {did_you_mean(name, tasks)}")
    return tasks[found[0]]


def tabulate_public_tasks() -> str:
    """Return a table of the tasks that can be downloaded."""
    rows = [("task", "channels", "labelled", "test", "labels", "licence")]
    for task in list_public_tasks():
        structures = [name for value, name in task.labels.items() if value != 0]
        counts = (str(task.num_training), str(task.num_test))
        rows.append((task.name, ", ".join(task.modalities), *counts, ", ".join(structures), task.licence))
    return "\n".join(align_columns(rows))


def describe_public_task(task: PublicTask) -> str:
    """Return a description of a task that can be downloaded."""
    plan = task.manifest.get("plan", {})
    facts = [
        ("task", task.name),
        ("from", task.url),
        ("md5", task.md5),
        ("licence", task.licence),
        ("cases", f"{task.num_training} with labels, {task.num_test} without"),
        ("channels", format_numbered(enumerate(task.modalities))),
        ("labels", format_numbered(task.labels.items())),
        *([("plan", ", ".join(f"{name} {value}" for name, value in plan.items()))] if plan else []),
        *(("note", quirk) for quirk in task.manifest.get("quirks", ())),
    ]
    return "\n".join([*align_columns(facts), f"fetch it with: {spell(f'volseg data fetch {task.name}')}"])


def format_numbered(names: Iterable[tuple[int, str]]) -> str:
    """Return names with their numbers, such as ``0 background, 1 liver``."""
    return ", ".join(f"{number} {name}" for number, name in names)


def _name_shortly(name: str) -> set[str]:
    number, _, organ = name.casefold().partition("_")
    digits = number.removeprefix("task")
    short = digits.lstrip("0")
    return {name.casefold(), number, organ, digits, short, f"task{short}"}


@cache  # a training requests its task's manifest four times
def _read(path: Path) -> PublicTask:
    manifest = read_yaml(path, str(path))
    known = {field.name: manifest[field.name] for field in fields(PublicTask) if field.name != "manifest"}
    return PublicTask(**{**known, "modalities": tuple(manifest["modalities"])}, manifest=manifest)


def _find_manifests() -> Path:
    """Return the folder of manifests: next to this file in an installation, else in the source tree."""
    installed = Path(__file__).with_name("manifests")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "datasets" / "msd"


def list_shipped() -> dict[str, Path]:
    """Return the file of each config by name: ``quickstart``, ``task04_cpu``, ``msd/task09_spleen`` ..."""
    installed = Path(__file__).parents[1] / "configs"
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "configs"
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def shipped_config_path(name: str) -> Path:
    """Return the file of a config that comes with volseg.

    Raises
    ------
    ConfigError
        If no config has the name.

    Examples
    --------
    >>> shipped_config_path("quickstart").name
    'quickstart.yaml'
    """
    known = list_shipped()
    if name not in known:
        raise ConfigError(f"no config called {name!r} comes with volseg; {did_you_mean(name, known)}")
    return known[name]
