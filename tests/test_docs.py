"""Pages refer to existing files and names, and every result and decision is linked from a page."""

import ast
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from documented import PAGES, ROOT, name_page, read_blocks

import volseg

RESULTS, DECISIONS = ROOT / "workflows" / "benchmarks" / "results", ROOT / "docs" / "decisions"

LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_PATH = re.compile(r"`((?:docs|configs|workflows)/[\w./-]+)`")
NAMED_MODULE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`")
OF_OTHERS = {"components.py", "task_params.py", "tiny_package.py"}
"""Files of users, and of MONAI's tutorials."""
RESULT_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*_(cpu|[ahv]\d+(x\d+)?)(_[a-z0-9]+)+\.(json|svg|json\.gz)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code, where brackets are no links and ``#`` begins no heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    titles = [line.lstrip("# ") for line in prose(page).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def local_links(page: Path) -> list[tuple[str, Path, str]]:
    """Return each local link of a page as it is written, the file it means, and the heading there."""
    written = [target for target in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", target)]
    parts = [(target, *target.partition("#")[::2]) for target in written]
    return [(target, (page.parent / path).resolve() if path else page, anchor) for target, path, anchor in parts]


def broken_links(page: Path) -> list[str]:
    """Return the local targets of a page that are not there: files, folders, headings, paths in backticks."""
    broken = [
        target
        for target, file, anchor in local_links(page)
        if not file.exists() or (anchor and anchor not in headings(file))
    ]
    modules = [name for name in NAMED_MODULE.findall(prose(page)) if name not in OF_OTHERS and not _is_file(name)]
    return broken + modules + [path for path in NAMED_PATH.findall(prose(page)) if not (ROOT / path).exists()]


@cache
def _is_file(name: str) -> bool:
    folders = ("volseg", "workflows", "tests", "docker", "docs", "datasets")
    return any(f"/{path}".endswith(f"/{name}") for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_links_and_paths_of_pages_exist() -> None:
    assert {name_page(page): broken for page in PAGES if (broken := broken_links(page))} == {}


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `idea`, said\n\n```\n# no heading\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    good = "[a](there.md) [b](there.md#one-idea-said) [c](https://nowhere.invalid/x) [d](#own) `docs/data.md`"
    page.write_text(
        f"# Own\n{good} [e](gone.md) [f](there.md#no-heading)\n[g](#gone) `gone.py` `docs/gone.md`\n"
        "```\ncall[0](x)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["gone.md", "there.md#no-heading", "#gone", "gone.py", "docs/gone.md"]


def test_every_result_is_linked_from_a_page_and_named_by_network_hardware_and_question() -> None:
    results = sorted(path for path in RESULTS.rglob("*") if path.is_file())
    assert results
    linked = {file for page in PAGES for _, file, _ in local_links(page)}
    assert [path.name for path in results if path.resolve() not in linked] == []
    assert [path.name for path in results if not RESULT_NAME.fullmatch(path.name)] == []


def test_measurements_have_ten_tables_each_with_its_command_and_result() -> None:
    sections = re.split(r"^##+ ", (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8"), flags=re.M)
    tabled = [section for section in sections if "\n| --- |" in section]
    assert sum(section.count("\n| --- |") for section in tabled) <= 10
    incomplete = [section for section in tabled if "ommand" not in section or "benchmarks/results/" not in section]
    assert [section.partition("\n")[0] for section in incomplete] == []


def test_decisions_are_few_short_whole_and_indexed() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    pages = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    assert 0 < len(pages) <= 40
    for page in pages:
        title, *rest = page.read_text(encoding="utf-8").splitlines()
        assert re.match(r"# [A-Z`]", title), page
        assert len(rest) < 60, page
        sections = [line for line in rest if line.startswith("## ")]
        assert sections == ["## Decision", "## Why", "## Tried and rejected"], page
        assert f"]({page.name})" in index, page


def broken_names(code: str) -> list[str]:
    """Return volseg names that a block imports or calls, but that do not exist or cannot be called."""
    broken = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "volseg":
            home = import_module(node.module or "")
            names = {one.name: f"{node.module}.{one.name}" for one in node.names}
            broken += [path for name, path in names.items() if not hasattr(home, name) and not _is_module(path)]
        elif isinstance(node, ast.Call) and re.fullmatch(r"volseg(\.\w+)+", path := ast.unparse(node.func)):
            found: object = volseg
            for name in path.split(".")[1:]:
                found = getattr(found, name, None)
            broken += [] if callable(found) else [path]
    return broken


NAMED_IN_PROSE = re.compile(r"`((?:volseg|monai)(?:\.\w+)+)")


def is_there(path: str) -> bool:
    """Return whether a dotted name is a module or an attribute of one."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if _is_module(module):
            found: object = import_module(module)
            for name in parts[length:]:
                found = getattr(found, name, None)
            return found is not None
    return False


def test_dotted_names_of_pages_are_there() -> None:
    """Also names in tables of other frameworks. Pages about the past are left out."""
    told = [page for page in PAGES if page.name not in ("CHANGELOG.md", "measurements.md") and page.parent != DECISIONS]
    named = {(name_page(page), path) for page in told for path in NAMED_IN_PROSE.findall(prose(page))}
    assert [(page, path) for page, path in named if not is_there(path)] == []


def _is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def test_what_scripts_and_pages_import_and_call_can_be() -> None:
    """Imports inside of functions, too: a benchmark's stood there for a name that had moved, and failed on a GPU.

    ``volseg.parallel.verification.verify(...)`` stood in a page: a module, since the move, and no function.
    """
    texts = {script.name: script.read_text(encoding="utf-8") for script in (ROOT / "workflows").rglob("*.py")}
    texts |= {str(block): block.text for page in PAGES for block in read_blocks(page, "python")}
    assert {name: broken for name, text in texts.items() if (broken := broken_names(text))} == {}


def test_a_call_of_a_module_and_an_absent_name_are_found() -> None:
    calls = "volseg.parallel.verification.verify(net)\nvolseg.gone(volseg.FastKernels(net))\nvolseg.plan(net).table()"
    code = f"from volseg.data import Read, Write\n{calls}"
    assert broken_names(code) == ["volseg.data.Write", "volseg.parallel.verification.verify", "volseg.gone"]
