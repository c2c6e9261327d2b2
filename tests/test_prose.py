"""Words and sentence forms that are banned from pages, docstrings, comments and messages.

Each is either not English that an engineer writes, or the reader cannot tell who does what. Counted are whole words, so
that names in code (``is_told``) do not count. Pages hold none. The code's numbers are what is left; they only shrink.
"""

import re

import pytest
from documented import PAGES, ROOT, name_page

INSTEAD = {
    r"mend(?:s|ed|ing)?": "fix, correct, repair",
    r"who(?:m|ever)": "name the person or the part",
    r"of none of": "none of ... has",
    r"said once": "logged once",
    r"(?:is|are|was|were|be|been) told(?! apart)": "name who reports what to whom",
    r"stands? there": "is in, is documented in",
    r"there already|already there": "exists",
    r"without a word": "silently",
    r"none of which": "a sentence of its own",
    r"in which every": "a sentence of its own",
    r"alone(?! with)": "only",
    r"gives? way to": "is replaced by",
    r"may be had": "is available",
}
"""A pattern, and what to write in its place."""

LEFT: dict[str, int] = {r"who(?:m|ever)": 2, r"alone(?! with)": 78}
"""How often each stands in ``volseg`` (docstrings, comments, messages). Lower a number when you remove one."""


def find_words(text: str, pattern: str) -> list[str]:
    """Return each occurrence with some words around it."""
    hits = re.finditer(rf"(?<![\w.`-])(?:{pattern})(?![\w(=-])", text, re.IGNORECASE)
    return [" ".join(text[max(hit.start() - 40, 0) : hit.end() + 20].split()) for hit in hits]


def find_all(texts: dict[str, str], pattern: str) -> dict[str, list[str]]:
    """Return the occurrences by file, of the files that have some."""
    return {name: hits for name, text in texts.items() if (hits := find_words(text, pattern))}


def test_pages_have_none_of_the_words() -> None:
    code = re.compile(r"^```.*?^```|`[^`\n]+`", flags=re.M | re.S)
    texts = {name_page(page): code.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    found = {INSTEAD[pattern]: hits for pattern in INSTEAD if (hits := find_all(texts, pattern))}
    assert not found, f"write instead: {found}"


def test_the_code_has_no_more_of_them_than_before() -> None:
    texts = {str(path): path.read_text(encoding="utf-8") for path in sorted((ROOT / "volseg").rglob("*.py"))}
    for pattern, instead in INSTEAD.items():
        found = find_all(texts, pattern)
        count = sum(map(len, found.values()))
        assert count <= LEFT.get(pattern, 0), f"write instead: {instead}\n{found}"
        assert count >= 0.8 * LEFT.get(pattern, 0), f"fewer are left of {pattern}: lower the number to {count}"


@pytest.mark.parametrize(
    ("text", "pattern", "count"),
    [
        ("Say warnings and errors alone.", r"alone", 1),
        ("standalone, alone with it, leave_alone(x)", r"alone(?! with)", 0),
        ("A worker is told its case; it was told\nso.", r"(?:is|are|was|were|be|been) told(?! apart)", 2),
        ("Whoever mended it, whom", r"who(?:m|ever)", 2),
        ("amended, mend_task, mending", r"mend(?:s|ed|ing)?", 1),
    ],
)
def test_a_word_is_found(text: str, pattern: str, count: int) -> None:
    assert len(find_words(text, pattern)) == count
