"""The generated parts of pages are what the program says today."""

import sys

import pytest
from documented import PAGES, ROOT, name_page

sys.path.insert(0, str(ROOT / "docs" / "site"))

from generated_text import GENERATED, MAKERS, with_generated_text

TEXTS = {name_page(page): text for page in PAGES if GENERATED.search(text := page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", TEXTS)
def test_generated_text_is_current(page: str) -> None:
    held, made = TEXTS[page].splitlines(), with_generated_text(TEXTS[page]).splitlines()
    differing = [pair for pair in zip(held, made, strict=False) if pair[0] != pair[1]]
    assert not differing, (
        f"{page}: run `make docs-text`; the first line that differs, then the current one: {differing[0]}"
    )
    assert len(held) == len(made), f"{page}: run `make docs-text`"


def test_each_part_is_in_one_page() -> None:
    parts = [name for text in TEXTS.values() for _, name, _ in GENERATED.findall(text)]
    assert sorted(parts) == sorted(MAKERS)
