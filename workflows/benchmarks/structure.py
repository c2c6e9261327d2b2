"""Count what a code base's structure shows, for several checkouts side by side.

python workflows/benchmarks/structure.py before=DIR after=. --result structure.json

Lines per folder, circles of imports, the largest modules, functions with many parameters, long functions, private
names of torch and caches of modules: all read from the syntax trees of ``volseg``, nothing is imported.
"""

import argparse
import ast
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANY_PARAMETERS, LONG_FUNCTION, LONG_MODULE = 7, 40, 400
CACHES = ("cache", "lru_cache")
FOLDERS = 3
"""Levels of folders that are counted by themselves."""

Functions = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Measure every checkout and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
    found = {name: measure(Path(folder)) for name, folder in (item.split("=", 1) for item in chosen.checkouts)}
    report = {"command": shlex.join(["python", *sys.argv]), "checkouts": found}
    text = json.dumps(report, indent=1) + "\n"
    if chosen.result:
        chosen.result.write_text(text, encoding="utf-8")
    print(text)


def measure(root: Path) -> dict[str, Any]:
    """Return the counts of one checkout."""
    files = sorted((root / "volseg").rglob("*.py"))
    sources = {file.relative_to(root): file.read_text(encoding="utf-8") for file in files}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lines = {path: text.count("\n") for path, text in sources.items()}
    folders: Counter[str] = Counter()
    for path, count in lines.items():
        folders["/".join(path.parent.parts[:FOLDERS])] += count
    modules = {_name(path): tree for path, tree in trees.items()}
    edges = {kind: _edges(modules, kind) for kind in ("executed", "typing")}
    both = {name: edges["executed"][name] | edges["typing"][name] for name in modules}
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, Functions)]
    return {
        "lines": sum(lines.values()),
        "modules": len(lines),
        "lines per folder": dict(sorted(folders.items())),
        "modules directly in the largest folder": max(Counter(path.parent for path in lines).values()),
        "circles of imports, inside functions too": [sorted(circle) for circle in circles(edges["executed"])],
        "circles of imports, typing-only ones too": len(list(circles(both))),
        "imports inside functions": sum(_imports_inside(tree) for tree in trees.values()),
        "largest modules": {str(path): count for path, count in sorted(lines.items(), key=lambda item: -item[1])[:8]},
        f"modules over {LONG_MODULE} lines": sum(count > LONG_MODULE for count in lines.values()),
        f"functions over {LONG_FUNCTION} lines": sum(_length(node) > LONG_FUNCTION for _, node in functions),
        f"functions with more than {MANY_PARAMETERS} parameters": sorted(
            f"{path}: {node.name} ({_parameters(node)})"
            for path, node in functions
            if _parameters(node) > MANY_PARAMETERS and not _is_kernel(node)
        ),
        "modules that use private names of torch": len([1 for tree in trees.values() if any(private_names(tree))]),
        "private names of torch": sorted({name for tree in trees.values() for name in private_names(tree)}),
        "caches of modules": sorted(cache for path, tree in trees.items() for cache in _caches(path, tree)),
    }


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _edges(modules: dict[str, ast.Module], kind: str) -> dict[str, set[str]]:
    """Return which modules each imports, at run time or for type checkers only."""
    found: dict[str, set[str]] = {name: set() for name in modules}

    def visit(node: ast.AST, name: str, typing: bool) -> None:
        for child in ast.iter_child_nodes(node):
            only = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            wanted: list[str] = []
            if isinstance(child, ast.Import):
                wanted = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                parts = [f"{child.module}.{alias.name}" for alias in child.names]
                wanted = [part if part in modules else child.module for part in parts]
            if only == (kind == "typing"):
                found[name].update(module for module in wanted if module in modules and module != name)
            visit(child, name, only)

    for name, tree in modules.items():
        visit(tree, name, typing=False)
    return found


def circles(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yield the sets of modules that reach one another (strongly connected components of several)."""
    reach = {name: _reached(name, edges) for name in edges}
    seen: set[str] = set()
    for name in edges:
        circle = {other for other in reach[name] if name in reach[other]}
        if len(circle) > 1 and name not in seen:
            seen |= circle
            yield circle


def _reached(name: str, edges: dict[str, set[str]]) -> set[str]:
    todo, found = [name], set()
    while todo:
        for other in edges[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


def _imports_inside(tree: ast.Module) -> int:
    functions = [node for node in ast.walk(tree) if isinstance(node, Functions)]
    return len({id(n) for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)})


def _length(node: Functions) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: Functions) -> int:
    """Count a function's parameters, without ``self``, and without those of a constructor: its class documents them."""
    if node.name == "__init__":
        return 0
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def _is_kernel(node: Functions) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names below ``torch`` with a leading underscore, imported or reached."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            full = [name] if (name := ast.unparse(node)).replace(".", "").isidentifier() else []
        else:
            continue
        for name in full:
            parts = name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:]):
                yield name


def _caches(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, Functions):
            if any(any(cache in ast.unparse(decorator) for cache in CACHES) for decorator in node.decorator_list):
                yield f"{path}: {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            empty = isinstance(node.value, ast.Dict) and not node.value.keys
            weak = isinstance(node.value, ast.Call) and "Weak" in ast.unparse(node.value.func)
            if empty or weak:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                yield f"{path}: {ast.unparse(target)}"


if __name__ == "__main__":
    main()
