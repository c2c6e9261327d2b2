"""The order of the house: no circle of imports, no import in a function without a reason, no class name twice."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
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
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(node: ast.AST, function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """List the imports of a tree that are more than typing's, and whether each stands inside a function."""
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
    """Return which of the known modules an import names; the packages that they lie in are not counted."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    below = {f"{node.module}.{alias.name}" for alias in node.names}
    rest = {node.module} if below - known else set()
    return ((below | rest) & known) if node.module else set()


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports, when it is imported or when one of its functions is called."""
    known = set(modules)
    return {
        name: {other for node, _ in imports_of(parse(path)) for other in imported(node, known)}
        for name, path in modules.items()
    }


def circle_through(start: str, graph: dict[str, set[str]]) -> list[str] | None:
    """Return the shortest way from a module back to itself."""
    ways, seen = [[start]], set()
    while ways:
        way = ways.pop(0)
        for other in sorted(graph[way[-1]]):
            if other == start:
                return [*way, start]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return None


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the shortest circle through each module that lies on one, each circle once."""
    found = {}
    for name in sorted(graph):
        circle = circle_through(name, graph)
        if circle is not None:
            found.setdefault(frozenset(circle), circle)
    return list(found.values())


def test_no_circle_of_imports() -> None:
    circles = circles_of(graph_of(MODULES))
    assert not circles, f"{len(circles)} circles of imports:\n" + "\n".join(" -> ".join(circle) for circle in circles)


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
    assert circles_of(graph) == [["house.door", "house.wall", "house.door"]]


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


MODES = re.compile(r"[rwax+t]+")
"""Of a file that is opened as text."""

ARCHIVES = {"tarfile.open"}
"""Whose modes are others'."""


def without_encoding(text: str) -> list[int]:
    """Return the lines on which text is read or written in whatever encoding the process's locale has."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given or None in given:
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        behind_path = node.args if is_method else node.args[1:]
        mode = given.get("mode", next(iter(behind_path), ast.Constant("r")))
        is_text = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and MODES.fullmatch(mode.value)
        if (
            (is_method and name == "read_text" and not node.args)
            or (is_method and name == "write_text" and len(node.args) == 1)
            or (name == "open" and is_text and ast.unparse(node.func) not in ARCHIVES)
            or given.keys() & {"text", "universal_newlines"}
        ):
            lines.append(node.lineno)
    return sorted(lines)


def test_text_has_an_encoding() -> None:
    """What a process reads and writes by its locale is another one where that is C, and a library may change it."""
    files = [
        path for folder in ("volseg", "tests", "workflows") for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    found = {
        str(path.relative_to(REPOSITORY)): lines
        for path in files
        if (lines := without_encoding(path.read_text(encoding="utf-8")))
    }
    assert not found, f'say encoding="utf-8": {found}'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("path.read_text()\npath.write_text(text)", [1, 2]),
        ("open(path)\nopen(path, 'w')\npath.open()\npath.open(mode='a')", [1, 2, 3, 4]),
        ("run(command, text=True)", [1]),
        ("path.read_text(encoding='utf-8')\nopen(path, 'rb')\npath.open('wb')\nos.open(path, flags)", []),
        ("folder.write_text(name, text)\nrun(command, **options)\ntarfile.open(path, mode='w')", []),
    ],
)
def test_a_text_without_an_encoding_is_seen(text: str, lines: list[int]) -> None:
    assert without_encoding(text) == lines


LIMITS = {
    "lines of code": 60_420,
    "modules": 510,
    "modules of the largest folder": 23,
    "functions called find_": 36,
    "lines of tests": 71_640,
    "benchmark scripts": 25,
    "lines of benchmarks": 7_500,
    "words of docs": 57_800,
}
"""How large the house may be. Lower a number when the house shrinks; raise none: what a change adds, it takes away.

Words of docs are those written by hand. Text that `make docs-text` writes into pages has a row of its own, without a
limit: it follows from the code.
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
