"""The blocks of code of the pages, for the tests that run them.

A block that cannot be run here says so above itself, and why: ``<!-- not run: needs 2 GPUs -->``.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in ("*", "docs/**/*", "datasets/*", "docker/*", "workflows/**/*")
    for page in ROOT.glob(f"{folder}.md")
)

FENCED = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n\n?)?```(?P<language>\w*)(?: (?P<title>\S+))?\n(?P<text>.*?)^```$",
    re.M | re.S,
)
COMMAND = re.compile(r"(?<![\w/.-])volseg [a-z-]")
LANGUAGES = {"", "bash", "console", "csv", "json", "pycon", "python", "sh", "text", "toml", "yaml"}


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, what it is, and why it is not run if it says so."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{name_page(self.page)}:{self.line}"


def name_page(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def read_blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return the page's blocks in their order, or those of one language."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            page,
            text.count("\n", 0, match.start("text")),
            *(match[name] or "" for name in ("language", "title", "text", "reason")),
        )
        for match in FENCED.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``volseg`` of each command in a block of shell, or of what a terminal shows.

    >>> list(commands_in("volseg data list   # all of them\\nuntil volseg train CONFIG; do sleep 1; done"))
    [['data', 'list'], ['train', 'CONFIG']]
    """
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not COMMAND.search(line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|<>"):
                if "volseg" in words:
                    yield words[words.index("volseg") + 1 :]
                words = []
            else:
                words.append(word)
