"""The page about spatial parallelism lists what the code supports."""

from pathlib import Path

from volseg.parallel.spatial.document import BEGIN, with_table
from volseg.parallel.spatial.table import documented

PAGE = Path(__file__).parents[3] / "docs" / "spatial.md"


def test_the_table_of_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert BEGIN in text
    assert text == with_table(text), "run: python -m volseg.parallel.spatial.document docs/spatial.md"


def test_each_family_has_functions() -> None:
    families = documented()
    assert {"Convolution", "Pooling", "Interpolation", "Normalisation", "Reductions", "Losses"} <= set(families)
    assert all(families.values())
