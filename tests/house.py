"""Count lines of code, modules, tests and pages.

``python tests/house.py`` prints lines of code and modules per package, and sizes of tests, pages and benchmarks. A line
of code is neither blank nor a comment nor part of a docstring.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def count_code(text: str) -> int:
    """Return the number of lines of code of a module."""
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in documented)


def count_packages(source: Path = ROOT / "volseg") -> dict[str, tuple[int, int]]:
    """Return lines of code and modules of each package, the largest first; modules outside of one as ``(root)``."""
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).parts
        package = parts[0] if len(parts) > 1 else "(root)"
        lines[package] += count_code(path.read_text(encoding="utf-8"))
        modules[package] += 1
    return {package: (count, modules[package]) for package, count in lines.most_common()}


def count_rest(root: Path = ROOT) -> dict[str, int]:
    """Return sizes of tests, benchmarks, pages and the largest folder, and the number of functions called ``find_``."""
    scripts = [*(root / "workflows" / "benchmarks").glob("*.py")]
    pages = [*(root / "docs").rglob("*.md")]
    words = [split_words(page.read_text(encoding="utf-8")) for page in pages]
    modules = [*(root / "volseg").rglob("*.py")]
    return {
        "modules of the largest folder": max(Counter(module.parent for module in modules).values()),
        "functions called find_": sum(module.read_text(encoding="utf-8").count("def find_") for module in modules),
        "lines of tests": sum(map(count_lines, (root / "tests").rglob("*.py"))),
        "benchmark scripts": len(scripts),
        "lines of benchmarks": sum(map(count_lines, scripts)),
        "words of docs": sum(written for written, _ in words),
        "generated words of docs": sum(generated for _, generated in words),
        "pages of decisions": sum(page.parent.name == "decisions" for page in pages),
    }


def split_words(page: str) -> tuple[int, int]:
    """Return how many words of a page are written by hand, and how many `make docs-text` writes between its marks."""
    written = re.sub(r"<!-- generated: ([a-z ]+) -->.*?<!-- end of \1 -->", "", page, flags=re.S)
    return len(written.split()), len(page.split()) - len(written.split())


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def write_table() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    packages = count_packages()
    yield "| package | lines of code | modules |"
    yield "| --- | --- | --- |"
    yield from (f"| {package} | {lines} | {modules} |" for package, (lines, modules) in packages.items())
    yield f"| **all** | **{sum(a for a, _ in packages.values())}** | **{sum(b for _, b in packages.values())}** |"
    yield from (f"| {name} | {count} | |" for name, count in count_rest().items())


if __name__ == "__main__":
    sys.stdout.write("\n".join(write_table()) + "\n")
