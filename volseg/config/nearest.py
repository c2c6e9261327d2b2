"""Name what a reader of a config probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


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
