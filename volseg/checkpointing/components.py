"""Record the sources of a run's custom components, and check that they are available when the run is used again.

``components.json`` records the source of each component; ``components/`` has copies of files. The copies run only if
the user names them with ``--components``.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from volseg.checkpointing.compatible import refuse
from volseg.checkpointing.folder import RunFolder
from volseg.config.registry import Source
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case
from volseg.data.json_files import read_json
from volseg.data.readers import list_case_files, match_suffix
from volseg.errors import ConfigError, DataError
from volseg.experiment.own_components import REGISTRIES, load_content
from volseg.files import replacing

logger = logging.getLogger(__name__)

RECORD, FILES = "components.json", "components"
"""The record, and the folder of copies."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Record of a component of a run."""

    kind: str
    name: str
    source: Source


def write_components(folder: RunFolder, config: ExperimentConfig, cases: Iterable[Case]) -> None:
    """Write the source of every component of the run that is not built in, and copies of files."""
    used = sorted({*_list_named(config), *_list_readers(cases)})
    found = [(kind, name, source) for kind, name in used if (source := REGISTRIES[kind].get_source(name)) is not None]
    content = [{"kind": kind, "name": name, "from": source.as_json()} for kind, name, source in found]
    for source in {source for _, _, source in found if source.file is not None}:
        with replacing(copy_path(folder.path, source)) as partial:
            partial.write_bytes(load_content(source))
    folder.write_json(RECORD, content)


def require_components(folder: Path, *, resumes: bool) -> None:
    """Raise unless every component of the run in ``folder`` is available.

    Parameters
    ----------
    folder : Path
    resumes : bool
        Whether the run resumes: then its readers must be available, and files must have the same bytes. Otherwise a
        changed file is only logged.

    Raises
    ------
    ConfigError
        The message names the missing or changed component, and how to provide it.
    """
    recorded = [one for one in read_components(folder) if one.kind != "reader" or resumes]
    if missing := [one for one in recorded if one.name not in REGISTRIES[one.kind]]:
        by_source: dict[Source, list[str]] = {}
        for one in missing:
            by_source.setdefault(one.source, []).append(f"{one.kind} {one.name!r}")
        absent = "; ".join(f"{', '.join(names)} from {source}" for source, names in by_source.items())
        raise ConfigError(
            f"{folder} uses missing components: {absent}. Add them with {_describe_remedy(folder, missing[0].source)}"
        )
    for one in recorded:
        now = REGISTRIES[one.kind].get_source(one.name)
        same_bytes = now is not None and one.source.sha256 is not None and now.sha256 == one.source.sha256
        if now == one.source or same_bytes:  # the file may have moved
            continue
        change = (
            f"{folder} was started with {one.kind} {one.name!r} from {one.source}, but now it is from {now or 'volseg'}"
        )
        if resumes and one.source.file is not None:
            refuse("bytes of files of `--components`", folder, change=change, way=_describe_remedy(folder, one.source))
        logger.warning("%s", change)


def describe_components(config: ExperimentConfig) -> list[list[str]]:
    """Return kind, name and source of the user's own components that a prediction depends on.

    All readers are included, as the reader of an image is unknown until the image is read.
    """
    used = {(kind, name) for kind, name in _list_named(config) if kind in ("network", "transform")}
    used |= {("reader", suffix) for suffix in REGISTRIES["reader"]}
    found = ((kind, name, REGISTRIES[kind].get_source(name)) for kind, name in sorted(used))
    return [[kind, name, source.sha256 or str(source)] for kind, name, source in found if source is not None]


def read_components(folder: Path) -> list[Recorded]:
    """Read the record of `write_components`; empty for a run with built-in components only.

    Raises
    ------
    DataError
        If the file has other content.
    """
    file = folder / RECORD
    if not file.exists():
        return []
    content = read_json(file)
    if not isinstance(content, list) or not all(
        isinstance(one, dict) and one.get("kind") in REGISTRIES and isinstance(one.get("name"), str) for one in content
    ):
        raise DataError(f"{file} should contain kind, name and source of components; restore it from a backup")
    return [
        Recorded(kind=one["kind"], name=one["name"], source=Source.from_json(one.get("from"), file)) for one in content
    ]


def copy_path(folder: Path, source: Source) -> Path:
    """Return the path of a run's copy of a file."""
    path = Path(source.file or "")
    return folder / FILES / f"{path.stem}_{(source.sha256 or '')[:12]}{path.suffix}"


def _describe_remedy(folder: Path, source: Source) -> str:
    """Return how to provide a component.

    The source may come from another user's run: a shell must not run any part of it.
    """
    if source.file is not None:
        file, copy = quote(source.file), quote(str(copy_path(folder, source)))
        return f"--components {file} as it was then; {copy} is a copy (read it first)"
    return f"an earlier call of volseg.register, as in {source.module}"


def _list_named(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Return kind and name of each component that a config names."""
    named: dict[str, Sequence[Any]] = {
        "network": [config.network],
        "optimizer": [config.optimizer],
        "schedule": [config.schedule],
        "loss": config.losses,
        "metric": config.metrics,
        "hook": config.hooks,
        "transform": config.preprocessing,
        "augmentation": config.augmentation.own,
        "logger": config.logging.loggers,
    }
    return ((kind, component.name) for kind, components in named.items() for component in components)


def _list_readers(cases: Iterable[Case]) -> Iterator[tuple[str, str]]:
    suffixes = (match_suffix(path) for case in cases for path in list_case_files(case))
    return (("reader", suffix) for suffix in suffixes if suffix is not None)
