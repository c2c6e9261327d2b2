"""Facts of a release: version, citation, install hints, and the length of the front pages."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from documented import ROOT

import volseg

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_is_complete_and_names_this_version():
    """Keys and values of the Citation File Format 1.2.0 that its schema requires or restricts."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    fixed = {"cff-version": "1.2.0", "type": "software", "version": volseg.__version__, "license": PROJECT["license"]}
    assert fixed.items() <= citation.items()
    assert citation["message"]
    assert citation["title"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    known = {"cff-version", "type", "version", "license", "message", "title", "authors", "abstract", "keywords"}
    assert set(citation) <= known
    assert len(set(citation["keywords"])) == len(citation["keywords"])


def test_the_release_workflow_reads_the_version_that_the_package_has():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    [compare] = [step for step in workflow["jobs"]["build"]["steps"] if "Compare" in step.get("name", "")]
    tag = shlex.quote(f"v{volseg.__version__}")
    subprocess.run(["bash", "-c", f"GITHUB_REF_NAME={tag}; {compare['run']}"], cwd=ROOT, check=True)
    assert subprocess.run(["bash", "-c", f"GITHUB_REF_NAME=v9; {compare['run']}"], cwd=ROOT).returncode == 1


UNREGISTERED = re.compile(r"pip install[^\n]*['\" ]volseg(\[|['\"\s]|$)")
"""Nobody owns the name ``volseg`` on the package index: who installs it from there runs a stranger's code."""


@pytest.mark.parametrize("folder", ["volseg", "docs", "docker", "configs", "workflows", "README.md", "CONTRIBUTING.md"])
def test_no_hint_installs_volseg_from_the_package_index(folder):
    home = ROOT / folder
    files = [path for path in home.rglob("*") if path.suffix in (".py", ".md", ".yaml", ".json", ".txt")]
    texts = {path: path.read_text(encoding="utf-8") for path in files or [home]}
    assert texts
    assert [str(path) for path, text in texts.items() if UNREGISTERED.search(text)] == []


@pytest.mark.parametrize(
    "hint", ["pip install 'volseg[dicom]'", "pip install volseg", "-U; pip install torch volseg\n"]
)
def test_a_hint_that_installs_volseg_is_seen(hint):
    assert UNREGISTERED.search(hint)
    assert not UNREGISTERED.search("pip install . and then import volseg.data")


def test_the_front_pages_are_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 6000
    for name, lines in (("CHANGELOG.md", 60), ("CONTRIBUTING.md", 120)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines
