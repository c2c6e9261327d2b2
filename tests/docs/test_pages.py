"""Pages name existing commands and messages, and build a site that requests nothing from outside."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import typer.main
from documented import PAGES, ROOT, commands_in, name_page, read_blocks

import volseg
from volseg import errors
from volseg.cli import app

sys.path.insert(0, str(ROOT / "docs" / "site"))

from generated_text import GENERATED, MAKERS, with_generated_text

# Each command of volseg that a page names is one: its verb is there, its options are, and its choices are taken.


INLINE = re.compile(r"(?<!`)`(volseg [^`]+)`(?!`)", re.S)


def parse_alone() -> object:
    """Return the whole command line with verbs that do nothing."""

    def silence(command):
        command.callback = None
        for option in command.params:
            if option.callback is not None:  # that of --install-completion writes into this machine's shell
                option.callback = lambda context, _, value: context.exit() if value else value
        for verb in getattr(command, "commands", {}).values():
            silence(verb)
        return command

    return silence(typer.main.get_command(app))


ALONE = parse_alone()


def refused(words: Sequence[str], *, whole: bool = True) -> str:
    """Return the command line's error for a command, or nothing; incomplete commands may lack required parts."""
    numbered = ["2" if word in ("N", "K") else word for word in words]
    try:
        ALONE.main(args=numbered, standalone_mode=False, prog_name="volseg")
    except Exception as error:  # click's own, by whichever copy of it typer has
        if not whole and (type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)):
            return ""
        return str(error)
    return ""


def refused_in(page: Path) -> list[str]:
    """Return the commands of a page that the command line refuses, in blocks and in sentences."""
    blocks = [block.text for block in read_blocks(page) if block.language in ("", "bash", "console", "sh", "text")]
    told = [(words, refused(words)) for text in blocks for words in commands_in(text)]
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in INLINE.findall(prose)]
    told += [(words, refused(words, whole=False)) for span in spans for words in commands_in(span)]
    return [f"volseg {' '.join(words)}: {message}" for words, message in told if message]


def test_the_command_line_takes_what_pages_type():
    told = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names what there was
    assert {name_page(page): refused for page in told if (refused := refused_in(page))} == {}


def test_commands_that_are_none_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Not `volseg train --gone` but `volseg train --gpus N`.\n\n```\nvolseg trian CONFIG\n"
        "volseg train CONFIG \\\n  --gpus two\n```\n",
        encoding="utf-8",
    )
    found = [line.partition(": ")[0] for line in refused_in(page)]
    assert found == ["volseg trian CONFIG", "volseg train CONFIG --gpus two", "volseg train --gone"]


# The generated parts of pages are what the program says today.


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


# What troubleshooting calls an error of ours is one: the program says its words. Every type of error is there.


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = re.findall(r"^### `([^`]+)` \(`(\w+)`\)$", PAGE, flags=re.M)
BASES = {"VolsegError"}


@cache
def list_lines() -> list[str]:
    """Return the lines of the program, each of its strings on one."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "volseg").rglob("*.py")]
    return [line for text in texts for line in re.sub(r"""["']\s*\n\s*[rf]*["']""", "", text).splitlines()]


def is_said(message: str) -> bool:
    """Say whether one string of the program has the parts of a message in their order."""
    parts = message.split("...")
    pattern, longest = ".*".join(map(re.escape, parts)), max(parts, key=len)
    return any(re.search(pattern, line) for line in list_lines() if longest in line)


def test_the_program_says_so():
    assert {kind for _, kind in OURS} <= {*errors.__all__}
    assert [message for message, _ in OURS if not is_said(message)] == []
    assert not is_said("the loss is not finite in month ..., batch ...")


def test_every_type_of_error_is_on_the_page():
    assert {name for name in errors.__all__ if f"`{name}`" not in PAGE} - BASES == set()


# The site is built without a warning, and asks nothing of the outside.


LOADED = re.compile(r"""<(?:script|img|iframe|source|video|audio|embed|link)\b[^>]*?\b(?:src|href)=["']?([^"' >]+)""")
LOADED_BY_STYLE = re.compile(r"url\([\"']?([^\"')]+)|@import [\"']([^\"']+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return the folder of the site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "docs/site/mkdocs.yml", "-d", folder]
    told = subprocess.run(
        command, capture_output=True, encoding="utf-8", env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert told.returncode == 0, told.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {path.parent / "index" if path.name == "README" else path for path in pages} - built == set()


def test_nothing_is_asked_of_the_outside(site):
    """Fonts, scripts, styles and pictures are in the site, so nobody learns of a page view."""
    asked = {
        (path.name, "".join(target))
        for pattern, loaded in (("*.html", LOADED), ("*.css", LOADED_BY_STYLE))
        for path in site.rglob(pattern)
        for target in loaded.findall(path.read_text(encoding="utf-8"))
        if re.match(r"(https?:)?//", "".join(target))
    }
    assert asked == set()


def test_lists_and_tables_are_such_here_as_well(site):
    """GitHub accepts a list without an empty line before it, but Python's Markdown does not."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    kept = {path: re.sub(r"<pre.*?</pre>", "", text, flags=re.S) for path, text in texts.items()}
    assert [path.name for path, text in kept.items() if re.search(r"^(- |\| ?---|```)", text, flags=re.M)] == []


def test_every_public_name_is_in_the_reference():
    """And not under another heading twice."""
    written = re.findall(r"^### volseg\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(written) == sorted({*volseg.__all__} - {"__version__"} | {"errors"})
