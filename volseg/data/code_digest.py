"""The code of somebody's own that prepares cases, as one digest: what was run, and what it imports.

Modules are digested by their source, each with all of its package. What they import from elsewhere is found in their
source, wherever an ``import`` stands: an installed distribution by its version, anything else by its source again. What
is imported by a name that is put together at run time is not seen.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from functools import cache
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from volseg.config.records import EXECUTED
from volseg.errors import ConfigError

__all__ = ["digest_modules"]

INSTALLED = {"site-packages", "dist-packages"}
"""Folders whose code belongs to a distribution with a version; one that is installed to be edited lies elsewhere."""


def digest_modules(modules: Collection[str], libraries: Collection[str]) -> str:
    """Return the digest of modules and of what they import, ``libraries`` and Python's own aside.

    Raises
    ------
    ConfigError
        If the source of one of ``modules`` cannot be found.
    """
    digest, known = sha256(), {"volseg", *libraries, *sys.stdlib_module_names} - {"__main__"}
    waiting = [name for name in sorted(modules) if name.partition(".")[0] not in known]
    while waiting:
        name = waiting.pop()
        known.add(name)
        for told, content in _list_sources(name):
            digest.update(told.encode() + b"\0" + sha256(content).digest())
            for other in sorted(_find_imports(content) - known):
                known.add(other)
                if (installed := _find_version(other)) is not None:
                    digest.update(f"{other}=={installed}".encode())
                elif _find_spec(other) is not None:
                    waiting.append(other)
                else:
                    digest.update(f"no {other}".encode())
    return digest.hexdigest()


def _list_sources(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of a module's code: all of its package, whose other modules it may call."""
    module = sys.modules.get(name)
    executed = getattr(module, EXECUTED, None)
    if executed is not None:
        yield name, executed
        return
    top = name.partition(".")[0]
    spec = None if name == "__main__" else _find_spec(top)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]
    origin = getattr(module, "__file__", None) or (spec.origin if spec else None)
    if not folders and (origin is None or not Path(origin).is_file()):
        raise ConfigError(
            f"the code of {name}, which prepares cases, cannot be found, so a stored case could be out of date "
            "without anybody noticing; put it into a file, or set data.cache to none"
        )
    files = [Path(origin)] if origin is not None and Path(origin).is_file() else []
    for file in [*files, *(file for folder in folders for file in sorted(folder.rglob("*.py")))]:
        yield file.name, file.read_bytes()


def _find_imports(content: bytes) -> set[str]:
    """Return the top-level packages that a source imports."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # compiled code, or a file of the package that nobody can run
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module]
    return {name.partition(".")[0] for name in names}


def _find_version(package: str) -> str | None:
    """Return the version of the distribution that a package is installed from, if it is."""
    spec = _find_spec(package)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if not any(INSTALLED & set(Path(place).parts) for place in places if place is not None):
        return None
    found = _packages().get(package)
    return ", ".join(f"{one} {version(one)}" for one in sorted(set(found))) if found else None


def _find_spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except ValueError:  # it was put into sys.modules by hand
        return None


_packages = cache(packages_distributions)
