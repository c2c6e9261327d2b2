"""The order of the house: no circular imports, no unexplained import in a function, no class name twice."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from house import count_code, count_packages, count_rest, split_words

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "volseg"


def modules_of(folder: Path) -> dict[str, Path]:
    """Return the files of a package by module name."""
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules_of(SOURCE)


@cache
def parse(path: Path) -> ast.Module:
    """Return the tree of a file; several tests walk through all files."""
    return ast.parse(path.read_text(encoding="utf-8"))


def is_typing_only(node: ast.AST) -> bool:
    asked = ast.walk(node.test) if isinstance(node, ast.If) else ()
    return any("TYPE_CHECKING" in (getattr(each, "id", ""), getattr(each, "attr", "")) for each in asked)


def imports_of(node: ast.AST, function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """List the imports of a tree except those for typing, and whether each is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, function
        elif is_typing_only(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from imports_of(ast.Module([other], []), function)
        else:
            inside = function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(child, inside)


def imported(node: ast.Import | ast.ImportFrom, known: set[str]) -> set[str]:
    """Return the known modules that an import names, without the packages that contain them."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    below = {f"{node.module}.{alias.name}" for alias in node.names}
    rest = {node.module} if below - known else set()
    return ((below | rest) & known) if node.module else set()


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return each module's imports, at import time or inside its functions."""
    known = set(modules)
    return {
        name: {other for node, _ in imports_of(parse(path)) for other in imported(node, known)}
        for name, path in modules.items()
    }


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        return list(fault.args[1])[::-1]
    return []


def test_no_circle_of_imports() -> None:
    circle = find_circle(graph_of(MODULES))
    assert not circle, " -> ".join(circle)


def test_the_graph_sees_what_imports_what(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    texts = {
        "__init__": "",
        "roof": "from house.wall import Wall",
        "wall": "if TYPE_CHECKING:\n    from house import roof\nelse:\n    import house.door",
        "door": "def open():\n    from house import wall",
        "floor": "import torch",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    graph = graph_of(modules_of(package))
    assert graph["house.roof"] == {"house.wall"}
    assert find_circle(graph) in (
        ["house.door", "house.wall", "house.door"],
        ["house.wall", "house.door", "house.wall"],
    )


def unexplained(path: Path) -> list[int]:
    """Return the lines of imports inside functions without a comment: there, above, or above those they follow."""
    lines = path.read_text(encoding="utf-8").splitlines()
    explained: set[int] = set()
    missing = []
    for node, inside in imports_of(parse(path)):
        own = lines[node.lineno - 1 : node.end_lineno]
        above = lines[node.lineno - 2].strip()
        if any("#" in line for line in own) or above.startswith("#") or node.lineno - 1 in explained:
            explained.add(node.end_lineno or node.lineno)
        elif inside:
            missing.append(node.lineno)
    return missing


def test_an_import_inside_a_function_says_why() -> None:
    found = {name: lines for name, path in MODULES.items() if (lines := unexplained(path))}
    assert not found, f"imports inside functions without a comment that says why: {found}"


def test_an_unexplained_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os\ndef one():\n    import sys\ndef two():\n    import sys  # slow\n    import re\ndef three():\n"
        "    # slow\n    import sys\n    x = 1\n    import re\n",
        encoding="utf-8",
    )
    assert unexplained(path) == [3, 11]


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not twice, f"one word for one thing: {twice}"


def test_the_text_of_processes_has_an_encoding() -> None:
    """Text in the locale's encoding is another one where that is C. The linter looks at files, not at processes."""
    files = [path for folder in ("volseg", "tests", "workflows") for path in (REPOSITORY / folder).rglob("*.py")]
    texts = {str(path): path.read_text(encoding="utf-8") for path in files if path != Path(__file__)}
    calls = {name: re.findall(r"run\([^()]*\btext=True[^()]*\)", text) for name, text in texts.items()}
    assert [name for name, found in calls.items() for call in found if "encoding=" not in call] == []


LIMITS = {
    "lines of code": 52_390,
    "modules": 417,
    "modules of the largest folder": 19,
    "functions called find_": 33,
    "lines of tests": 63_180,
    "benchmark scripts": 23,
    "lines of benchmarks": 6_070,
    "words of docs": 57_080,
}
"""How large the house may be. Lower a number when the house shrinks; raise none: what a change adds, it takes away.

Words of docs are those written by hand. Text that `make docs-text` writes has a row of its own, without a limit.
"""


def test_the_house_does_not_grow() -> None:
    packages = count_packages().values()
    sizes = {"lines of code": sum(a for a, _ in packages), "modules": sum(b for _, b in packages), **count_rest()}
    assert {name: size for name, size in sizes.items() if size > LIMITS.get(name, size)} == {}
    loose = {name: size for name, size in sizes.items() if size < 0.98 * LIMITS.get(name, 0)}
    assert not loose, f"the house is smaller: lower the limits of {loose}"


def test_generated_words_are_counted_apart() -> None:
    page = "# One page\n<!-- generated: a b -->\ntwo words\n<!-- end of a b -->\n<!-- generated: c -->\n"
    assert split_words(page) == (7, 13)


def test_lines_of_code_are_counted_without_words() -> None:
    assert count_code('"""A module."""\n\nx = 1  # one\n# a comment\ny = """\ntext"""\n') == 3


def test_the_list_of_long_tests_names_tests() -> None:
    for line in (REPOSITORY / "tests/long.txt").read_text(encoding="utf-8").splitlines():
        file, name = line.partition("[")[0].split()[1].split("::")
        assert f"def {name}(" in (REPOSITORY / file).read_text(encoding="utf-8"), line
