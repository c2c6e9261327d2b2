"""What mkdocs does not do: links to the repository's files outside ``docs``."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)

ELSEWHERE = "repository/"
"""Folder of the site for files of the repository that do not lie in ``docs``."""


def outside(page: Path) -> Iterator[Path]:
    """Yield the files outside ``docs`` that a page links to."""
    for _, target, _ in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        file = (page.parent / target).resolve()
        if ":" not in target and file.is_file() and ROOT in file.parents and ROOT / "docs" not in file.parents:
            yield file


def reached_files() -> set[Path]:
    """Return every file outside ``docs`` that a page links to, or a page so reached."""
    reached: set[Path] = set()
    waiting = sorted((ROOT / "docs").rglob("*.md"))
    while waiting:
        found = {*outside(waiting.pop())} - reached
        reached |= found
        waiting += [file for file in found if file.suffix == ".md"]
    return reached


def place_in_site(file: Path) -> str:
    """Return where a file of the repository lies in the site."""
    if file.is_relative_to(ROOT / "docs"):
        return file.relative_to(ROOT / "docs").as_posix()
    return ELSEWHERE + file.relative_to(ROOT).as_posix()


def place_in_repository(uri: str) -> Path:
    """Return the file that lies at a place of the site."""
    return ROOT / uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else ROOT / "docs" / uri


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside ``docs`` that pages link to."""
    from mkdocs.structure.files import File  # not where the tests of the pages import this module

    for file in sorted(reached_files()):
        files.append(File.generated(config, place_in_site(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write links as they are in the site."""
    uri = page.file.src_uri
    source = place_in_repository(uri)

    def moved(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        file = (source.parent / target).resolve()
        if ":" in target or not file.exists() or ROOT not in file.parents:
            return match.group()
        if file.is_dir():
            file = file / "README.md"
        return before + posixpath.relpath(place_in_site(file), posixpath.dirname(uri) or ".") + after

    parts, blocks = FENCED.split(markdown), FENCED.findall(markdown)
    # GitHub shows whatever stands behind the language of a block; here it is its title.
    blocks = [re.sub(r"\A```(\w+) (\S+)$", r'```\1 title="\2"', block, flags=re.M) for block in blocks]
    texts = [LINK.sub(moved, part) for part in parts]
    return "".join(piece for pair in zip(texts, [*blocks, ""], strict=True) for piece in pair)
