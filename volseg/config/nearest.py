"""Suggest known names and paths similar to an unknown one."""

import glob
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known names nearest to ``name``, or with all names if none is near.

    >>> did_you_mean("lerning_rate", ["learning_rate", "momentum"])
    "did you mean 'learning_rate'?"
    """
    known = sorted(known)
    lower = {candidate.lower(): candidate for candidate in reversed(known)}
    near = [lower[match] for match in get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known: {', '.join(known)}" if known else "there is none yet"


def find_near_path(path: Path) -> Path | None:
    """Return the existing path that a missing one probably means, or None.

    Try nnU-Net's data set with the name or number first, then a file or folder of a similar name in the same folder.
    """
    if path.exists():
        return None
    if raw := os.environ.get("nnUNet_raw"):  # noqa: SIM112 - the name is nnU-Net's
        pattern = f"Dataset{int(path.name):03d}_*" if path.name.isdecimal() else glob.escape(path.name)
        if found := sorted(Path(raw).glob(pattern)):
            return found[0]
    if not path.parent.is_dir():
        return None
    near = get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return path.parent / near[0] if near else None


def suggest_path(path: Path) -> str:
    """Return the end of an error message on a missing path, with a similar path if there is one."""
    near = find_near_path(path)
    return "" if near is None else f"; did you mean {str(near)!r}?"
