"""What the shell offers where a key, a name or a folder is to be typed; nothing here imports torch.

Verbs and options typer offers itself, and the shell its files.
"""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["complete_config", "complete_key", "complete_kind", "complete_network", "complete_run", "complete_shipped"]


def complete_key(incomplete: str) -> list[str]:
    """Return keys of a config that begin so, each with the sign behind which its value stands."""
    from volseg.config.json_schema import list_keys, read_schema  # pydantic: not before somebody asks

    return [f"{key}=" for key in list_keys(read_schema()) if key.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """Return networks that come with volseg."""
    from volseg.config.json_schema import list_names, read_schema  # pydantic: not before somebody asks

    return [name for name in list_names(read_schema(), "network") if name.lower().startswith(incomplete.lower())]


def complete_kind(incomplete: str) -> list[str]:
    """Return kinds of components."""
    from volseg.config.json_schema import KINDS, KINDS_OF_FIELDS  # pydantic: not before somebody asks

    kinds = {*KINDS.values(), *KINDS_OF_FIELDS.values(), "reader"}
    return sorted(kind for kind in kinds if kind.startswith(incomplete))


def complete_shipped(incomplete: str) -> list[str]:
    """Return configs that come with volseg."""
    from volseg.config.shipped import list_shipped  # errors and paths: not before somebody asks

    return [name for name in list_shipped() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Return configs that come with volseg, unless there are files that begin so, which the shell offers then."""
    typed = Path(incomplete)
    above = typed if incomplete.endswith("/") else typed.parent
    begun = "" if incomplete.endswith("/") else typed.name
    is_there = bool(begun) and above.is_dir() and any(path.name.startswith(begun) for path in above.iterdir())
    return [] if is_there else complete_shipped(incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Return folders of trainings and cross-validations, beside what is typed so far or in ``runs``."""
    typed = Path(incomplete)
    above = typed if incomplete.endswith("/") else typed.parent
    folders = [*_list_runs(above), *([] if "/" in incomplete else _list_runs(Path("runs")))]
    return sorted({str(folder) for folder in folders if str(folder).startswith(incomplete) or not incomplete})


def _list_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders in one that a training wrote."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / "config.yaml").is_file() or (path / "fold_0").is_dir():
            yield path
