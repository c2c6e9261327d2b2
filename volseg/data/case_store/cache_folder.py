"""Find, list, clear and verify the folder of prepared cases, and store facts of files in it.

A file counts as unchanged while its size, inode, modification time and change time (``ctime``) are the same. Restoring
a file's date sets the modification time; the change time cannot be set.
"""

import ast
import json
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import file_digest, sha256
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from volseg.config.registry import EXECUTED
from volseg.data.case_store.preprocessed import DamagedCaseError, StoredCase
from volseg.data.itk import resolve_voxel_file
from volseg.data.json_files import parse_json
from volseg.data.volume import require_regular
from volseg.errors import ConfigError, ReaderError
from volseg.files import CACHE_VARIABLE, choose_cache_folder, remove_partials, replacing

Found = TypeVar("Found")

SUFFIX = ".case"
GIB = 2**30

TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Made by volseg; may be removed. See https://bford.info/cachedir/\n"
)
"""Content of a tag file that excludes the folder from backups."""


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A file of the cache."""

    path: Path
    size: int
    used: float
    """Last time that a training opened the file, in seconds of the system's clock."""


def get_cache_folder(wanted: str) -> Path | None:
    """Return the cache folder for a maintenance command; see `choose_cache_folder`.

    Raises
    ------
    ConfigError
        If the named folder is a file, or does not exist.
    """
    folder = choose_cache_folder(wanted)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name the folder of a cache, or leave it out to use the default")
    if folder is not None and wanted != "auto" and not folder.exists():
        raise ConfigError(f"{folder} does not exist; name the folder of a cache, or leave it out to use the default")
    return folder


def list_entries(folder: Path) -> list[CacheEntry]:
    """Return all stored cases, the least recently used first."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder / "cases") as files:
        for file in files:
            if file.name.endswith(SUFFIX) and not file.name.startswith("."):
                with suppress(FileNotFoundError):  # another process may remove it
                    told = file.stat()
                    found.append(CacheEntry(path=Path(file.path), size=told.st_size, used=told.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def describe_entries(folder: Path | None) -> str:
    """Return a line for each folder of images with stored cases, and a last line for all."""
    if folder is None:
        return "no cases are stored: the cache is off (none)"
    by_source: dict[str, list[CacheEntry]] = defaultdict(list)
    entries = list_entries(folder)
    for entry in entries:
        try:
            by_source[str(StoredCase.open(entry.path).about["source"])].append(entry)
        except (OSError, DamagedCaseError):
            by_source["(damaged or just removed)"].append(entry)
    lines = [
        f"{len(kept)} case(s), {sum(entry.size for entry in kept) / GIB:.2f} GiB, last used "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(kept[-1].used))}, of {source}"
        for source, kept in by_source.items()
    ]
    total = f"{len(entries)} case(s), {sum(entry.size for entry in entries) / GIB:.2f} GiB, in {folder}"
    return "\n".join([*lines, total])


def remove_entries(folder: Path, *, unused_seconds: float = 0.0) -> list[CacheEntry]:
    """Remove and return the stored cases unused for ``unused_seconds``; a process that maps one keeps its memory."""
    latest = time.time() - unused_seconds if unused_seconds else math.inf  # a disk's clock may be ahead
    chosen = [entry for entry in list_entries(folder) if entry.used <= latest]
    for entry in chosen:
        entry.path.unlink(missing_ok=True)
    if unused_seconds == 0:
        for file in (folder / "files").glob("*.json"):
            file.unlink(missing_ok=True)
    remove_partials(folder, "*/.*.partial", latest)
    return chosen


def verify_entries(folder: Path) -> Iterator[tuple[CacheEntry, str | None]]:
    """Read every stored case fully; yield it with its fault, or None. A damaged case is removed."""
    for entry in list_entries(folder):
        try:
            StoredCase.open(entry.path).require_whole()
        except FileNotFoundError:
            continue
        except DamagedCaseError as fault:
            entry.path.unlink(missing_ok=True)
            yield entry, str(fault)
        else:
            yield entry, None


def make_cache_folder(folder: Path) -> None:
    """Create the folder, readable only by its owner.

    Raises
    ------
    ConfigError
        If it does not exist and cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # patient data
    except OSError as fault:
        raise ConfigError(
            f"prepared cases cannot be stored in {folder} ({fault.strerror or fault}); set data.cache or "
            f"{CACHE_VARIABLE} to another folder, or data.cache to none"
        ) from fault
    with suppress(OSError):  # for a read-only folder
        (folder / "cases").mkdir(exist_ok=True)
        if not (folder / "CACHEDIR.TAG").exists():
            (folder / "CACHEDIR.TAG").write_text(TAG, encoding="utf-8")


logger = logging.getLogger(__name__)

YOUNG_NS = 3 * 10**9
"""A file that was changed this shortly before its digest may be changed again within one tick of its file system's
clock (2 s on FAT), unnoticed."""

DETACHED = (".mhd", ".nhdr", ".mha", ".nrrd")
"""Suffixes of headers that may name another file."""


def list_image_files(path: Path) -> list[Path]:
    """Return all files that an image depends on: itself, the data file of its header, a series' files.

    Raises
    ------
    OSError, ReaderError
        If they cannot be found.
    """
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    if path.name.lower().endswith(DETACHED):
        return [path, resolve_voxel_file(path)]
    return [path]


class FileMemory:
    """Store of facts about files, such as their digests, for all processes while the files are unchanged.

    Parameters
    ----------
    folder : Path or None
        Folder of the remembered facts. A read-only folder only costs time; None remembers nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def digest_images(self, paths: Sequence[Path]) -> list[list[str]]:
        """Return name and digest of each file that the images depend on.

        Raises
        ------
        OSError, ReaderError
            If a file cannot be read.
        """
        files = [file for path in paths for file in list_image_files(path)]
        if missing := [path for path in paths if not path.exists()]:  # an empty folder is valid here
            raise ReaderError(f"{missing[0]} does not exist")
        return [[file.name, self.recall("digest", [file], partial(_digest_file, file))] for file in files]

    def recall(self, fact: str, files: Sequence[Path], compute: Callable[[], Found]) -> Found:
        """Return the result of ``compute``, a value for JSON, or the remembered one of unchanged files.

        Raises
        ------
        OSError, ReaderError
            If a file cannot be read; a pipe, which could block forever, is refused.
        """
        for file in files:
            require_regular(file)
        seen = [_read_state(file) for file in files]
        named = "\0".join([fact, *(os.path.abspath(file) for file in files)])
        known = None if self.folder is None else self.folder / f"{sha256(os.fsencode(named)).hexdigest()}.json"
        if isinstance(remembered := _load_remembered(known), dict) and remembered.get("seen") == seen:
            return cast(Found, remembered["found"])
        begun = time.time_ns()
        found = compute()
        latest = max((changed for state in seen for changed in state[2:]), default=0)
        is_settled = [_read_state(file) for file in files] == seen and begun - latest > YOUNG_NS
        if known is not None and is_settled:
            with suppress(OSError):  # a full disk: computed again
                known.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)  # as for prepared cases
                with replacing(known, flush=False) as partial_file:
                    partial_file.write_text(json.dumps({"seen": seen, "found": found}), encoding="utf-8")
        return found


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _read_state(path: Path) -> list[int]:
    with path.open("rb") as file:  # a network file system checks with its server at each opening
        found = os.fstat(file.fileno())
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _load_remembered(known: Path | None) -> Any:
    try:
        return None if known is None else parse_json(known.read_bytes())
    except (OSError, ValueError):  # never remembered, or damaged
        return None


INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed distributions, whose version represents the code; an editable installation is elsewhere."""


def digest_modules(modules: Collection[str], libraries: Collection[str]) -> str:
    """Return the digest of modules and of their imports, except ``libraries`` and Python's own modules.

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
            for other in sorted(_list_imports(content) - known):
                known.add(other)
                if (installed := _read_version(other)) is not None:
                    digest.update(f"{other}=={installed}".encode())
                elif _load_spec(other) is not None:
                    waiting.append(other)
                else:
                    digest.update(f"no {other}".encode())
    return digest.hexdigest()


def _list_sources(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a module's package: the module may call any of them."""
    module = sys.modules.get(name)
    executed = getattr(module, EXECUTED, None)
    if executed is not None:
        yield name, executed
        return
    top = name.partition(".")[0]
    spec = None if name == "__main__" else _load_spec(top)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]
    origin = getattr(module, "__file__", None) or (spec.origin if spec else None)
    if not folders and (origin is None or not Path(origin).is_file()):
        raise ConfigError(
            f"the code of {name}, which prepares cases, cannot be found, so the cache could not detect a change of it; "
            "put it into a file, or set data.cache to none"
        )
    files = [Path(origin)] if origin is not None and Path(origin).is_file() else []
    for file in [*files, *(file for folder in folders for file in sorted(folder.rglob("*.py")))]:
        yield file.name, file.read_bytes()


def _list_imports(content: bytes) -> set[str]:
    """Return the top-level packages that a source imports."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # compiled code, or a file that is not valid Python
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module]
    return {name.partition(".")[0] for name in names}


def _read_version(package: str) -> str | None:
    """Return the version of a package's installed distribution, or None."""
    spec = _load_spec(package)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if not any(INSTALLED & set(Path(place).parts) for place in places if place is not None):
        return None
    found = _packages().get(package)
    return ", ".join(f"{one} {version(one)}" for one in sorted(set(found))) if found else None


def _load_spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except ValueError:  # it was put into sys.modules manually
        return None


_packages = cache(packages_distributions)
