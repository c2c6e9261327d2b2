"""Name what a reader of a config probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = ["did_you_mean", "find_near_sibling"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known names nearest to ``name``, or all of them where none is near.

    >>> did_you_mean("lerning_rate", ["learning_rate", "momentum"])
    "did you mean 'learning_rate'?"
    """
    known = sorted(known)
    lower = {candidate.lower(): candidate for candidate in reversed(known)}
    near = [lower[match] for match in get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known: {', '.join(known)}" if known else "there is none yet"


def find_near_sibling(path: Path, *, is_folder: bool = False) -> Path | None:
    """Return the file or folder, or only the folder, whose name is most like that of a path that does not exist."""
    if not path.parent.is_dir():
        return None
    names = [each.name for each in path.parent.iterdir() if each.is_dir() or not is_folder]
    near = get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None
