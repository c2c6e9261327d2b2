"""The folder of prepared cases: find, list, clear and verify it."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from volseg.data.case_store.stored_case import DamagedCaseError, StoredCase
from volseg.errors import ConfigError

VARIABLE = "VOLSEG_CACHE"
"""Environment variable: the folder, or ``none``."""

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


def choose_cache_folder(wanted: str) -> Path | None:
    """Return the folder that ``data.cache`` means, or None for no cache.

    ``auto`` is ``$VOLSEG_CACHE``, else ``volseg`` in ``$XDG_CACHE_HOME``, else ``~/.cache/volseg``.
    """
    if wanted == "auto":
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        wanted = os.environ.get(VARIABLE) or os.path.join(home, "volseg")
    return None if wanted == "none" else Path(os.path.abspath(wanted))


def get_cache_folder(wanted: str) -> Path | None:
    """Return the cache folder for a maintenance command; see `choose_cache_folder`.

    Raises
    ------
    ConfigError
        If the named folder is a file, or does not exist.
    """
    folder = choose_cache_folder(wanted)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name the folder of a cache, or leave it out for the usual one")
    if folder is not None and wanted != "auto" and not folder.exists():
        raise ConfigError(f"{folder} does not exist; name the folder of a cache, or leave it out for the usual one")
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
        return "no cases are kept: the cache is none"
    by_source: dict[str, list[CacheEntry]] = defaultdict(list)
    entries = list_entries(folder)
    for entry in entries:
        try:
            by_source[str(StoredCase.open(entry.path).about["source"])].append(entry)
        except (OSError, DamagedCaseError):
            by_source["(damaged, or removed just now)"].append(entry)
    lines = [
        f"{len(kept)} case(s), {sum(entry.size for entry in kept) / GIB:.2f} GiB, last used "
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(kept[-1].used))}, of {source}"
        for source, kept in by_source.items()
    ]
    total = f"{len(entries)} case(s), {sum(entry.size for entry in entries) / GIB:.2f} GiB, in {folder}"
    return "\n".join([*lines, total])


def remove_entries(folder: Path, *, unused_seconds: float = 0.0) -> list[CacheEntry]:
    """Remove and return the stored cases unused for ``unused_seconds``; a process that maps one keeps its memory."""
    latest = time.time() - unused_seconds
    chosen = [entry for entry in list_entries(folder) if entry.used <= latest]
    for entry in chosen:
        entry.path.unlink(missing_ok=True)
    if unused_seconds == 0:
        for file in (folder / "files").glob("*.json"):
            file.unlink(missing_ok=True)
    remove_given_up(folder, latest)
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
    """Make the folder, readable only for its owner.

    Raises
    ------
    ConfigError
        If it does not exist and cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # these are patients
    except OSError as fault:
        raise ConfigError(
            f"prepared cases cannot be kept in {folder} ({fault.strerror or fault}); name another folder by "
            f"data.cache or {VARIABLE}, or set data.cache to none"
        ) from fault
    with suppress(OSError):  # for a read-only folder
        (folder / "cases").mkdir(exist_ok=True)
        if not (folder / "CACHEDIR.TAG").exists():
            (folder / "CACHEDIR.TAG").write_text(TAG, encoding="utf-8")


def remove_given_up(folder: Path, latest: float) -> None:
    """Remove incomplete files of killed processes."""
    for file in folder.glob("*/.*.partial"):
        with suppress(FileNotFoundError):
            if file.stat().st_mtime <= latest:
                file.unlink()
