"""The site is built without a warning, and asks nothing of the outside."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT

import volseg

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
    """Fonts, scripts, styles and pictures lie in the site: what a page loads is not known to anybody else."""
    asked = {
        (path.name, "".join(target))
        for pattern, loaded in (("*.html", LOADED), ("*.css", LOADED_BY_STYLE))
        for path in site.rglob(pattern)
        for target in loaded.findall(path.read_text(encoding="utf-8"))
        if re.match(r"(https?:)?//", "".join(target))
    }
    assert asked == set()


def test_lists_and_tables_are_such_here_as_well(site):
    """GitHub takes a list without an empty line before it, Python's Markdown takes it for the end of the sentence."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    kept = {path: re.sub(r"<pre.*?</pre>", "", text, flags=re.S) for path, text in texts.items()}
    assert [path.name for path, text in kept.items() if re.search(r"^(- |\| ?---|```)", text, flags=re.M)] == []


def test_every_public_name_is_in_the_reference():
    """And not under another heading twice."""
    written = re.findall(r"^### volseg\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(written) == sorted({*volseg.__all__} - {"__version__"} | {"errors"})
