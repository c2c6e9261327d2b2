"""Which files hold the tests of a marker, by their text, so that ``-m kernels`` or ``-m gpu`` imports no others."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

# How a file says that it holds tests of a marker; `with_kernels` of `kernels.py` gives either of two.
SAID = {
    "gpu": re.compile(r"\bmark\.gpu\b|\bwith_kernels\b"),
    "kernels": re.compile(r"\bmark\.kernels\b|\bwith_kernels\b"),
    "multi_gpu": re.compile(r"\bmark\.multi_gpu\b"),
}


def says(path: Path, marker: str) -> bool:
    """Return whether the text of a file of tests names the marker."""
    return SAID[marker].search(path.read_text(encoding="utf-8")) is not None


def leaves_out(path: Path, chosen: str) -> bool:
    """Return whether no test of a file can be one of those that ``-m`` chooses."""
    return chosen in SAID and path.suffix == ".py" and path.name.startswith("test_") and not says(path, chosen)


def require_said(marked: Iterable[tuple[Path, str]]) -> None:
    """Raise `pytest.UsageError` for a test with a marker that its file does not name: `leaves_out` would skip it."""
    for path, marker in sorted({*marked}):
        if not says(path, marker):
            raise pytest.UsageError(
                f"{path} holds tests marked {marker}, and its text does not say {SAID[marker].pattern!r}: "
                f"-m {marker} would leave it out. Mark them there, or add to SAID in {Path(__file__).name} what it says"
            )
