"""Store prepared cases on disk, so that the next fold, restart or resume does not prepare them again.

The name of a stored case is the digest of all inputs that determine its bits. So a stored case is never updated: after
any change another name is looked up. See ``docs/decisions/case-store.md``.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import volseg.transforms
from volseg.data.case_store.cache_folder import GIB, SUFFIX, FileMemory, digest_modules, list_entries, make_cache_folder
from volseg.data.case_store.preprocessed import DamagedCaseError, StoredCase, write_case
from volseg.data.case_store.volume_cache import ForegroundVoxels, list_voxels, require_fit
from volseg.data.cases import Case, Task
from volseg.data.readers import SUFFIXES, list_files, match_suffix
from volseg.errors import ConfigError, DataError, ReaderError
from volseg.files import PARTIAL_SECONDS, remove_partials, replacing
from volseg.memory import available_bytes
from volseg.transforms.preprocessing import PREPROCESSING, Preprocessing
from volseg.version import installed_version

logger = logging.getLogger(__name__)

LIBRARIES = ("monai", "nibabel", "numpy", "scipy", "SimpleITK", "torch")
"""Libraries that prepare cases, besides volseg; a library's version represents its code."""

OWN_CODE = (Path(__file__).parents[1], Path(volseg.transforms.__file__).parent)
"""Folders of volseg's code that reads, checks and prepares cases."""

FILES = ("image", "label", "stage")
"""Fields of a case that are files."""

LEFT_FREE_SHARE, LEFT_FREE_BYTES = 0.1, 20 * GIB
"""Share and size of the disk space that is left free; the smaller one counts."""

KEPT_SECONDS = 24 * 3600.0
"""A case that was used within this time is not removed to make room: a running training may need it again."""


class CaseCache:
    """Stored cases of one task and one preprocessing; safe for threads and processes.

    Parameters
    ----------
    folder : str or Path
        Created if necessary. A read-only folder is used without storing cases.
    task : Task
        Task for the checks of the cases.
    preprocessing : Preprocessing
        The preprocessing of `volseg.transforms.build_preprocessing`.
    limit_bytes : int
        Limit for all stored cases in the folder, of any task.

    Attributes
    ----------
    num_found, num_stored : int
        Cases that this process has found, and added.

    Raises
    ------
    ConfigError
        If the folder cannot be created, or the code of a step cannot be found.
    """

    def __init__(
        self, folder: str | Path, task: Task, preprocessing: Preprocessing, *, limit_bytes: int = 200 * GIB
    ) -> None:
        self.folder = folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.num_found = self.num_stored = 0
        self._common = _describe_preparing(task, preprocessing)
        self._num_classes, self._is_sparse = task.num_classes, task.ignore is not None
        self._memory = FileMemory(folder / "files")
        self._writes = True
        # Beyond this limit, verifying would evict earlier cases from memory.
        self._verified_bytes = available_bytes() // 2
        self._lock = threading.Lock()
        make_cache_folder(folder)

    def key_of(self, case: Case) -> str | None:
        """Return the name of a case's prepared form, or None if its files cannot be read."""
        try:
            files = {field: self._memory.digest_images(list_files(case[field])) for field in FILES if field in case}
        except (OSError, ReaderError):  # the check reports the fault
            return None
        return sha256(_format_json([self._common, _without_files(case), files]).encode()).hexdigest()

    @contextmanager
    def making(self, key: str) -> Iterator[StoredCase | None]:
        """Yield the stored case, or None to the one process or thread that must make it; the others wait."""
        stored = self._open_stored(key)
        if stored is not None:
            yield stored
            return
        with self._only_maker(key):
            yield self._open_stored(key)

    def store(self, key: str, case: Case, prepared: Case, found: Mapping[str, Any]) -> StoredCase | None:
        """Store a prepared case; return the stored form, or None if it cannot be stored.

        Parameters
        ----------
        key : str
            Key from ``key_of``, before the case was read.
        case : Case
            The case with paths.
        prepared : Case
            The prepared case with ``reference``.
        found : mapping
            Results of the check, as values for JSON.
        """
        if not self._writes or self.key_of(case) != key:  # a file was changed while it was read
            return None
        try:
            content = pack_case(prepared, case, self._num_classes, is_sparse=self._is_sparse)
        except DataError:  # the user of the case reports it
            return None
        source = list_files(case["image"])[0].absolute().parent
        about = {"case": str(case["case"]), "source": os.fsdecode(source), "found": found}
        path = self._path(key)
        try:
            with ExitStack() as locked, replacing(path) as partial:
                with partial.open("wb") as file:
                    write_case(file, content, about)
                # Held until the file has its name: another thread that lists the folder would not count it.
                locked.enter_context(self._lock)
                self._make_room(partial.stat().st_size)
            stored = StoredCase.open(path)
        except (OSError, TypeError, DamagedCaseError) as fault:
            self._stop_writing(fault)
            return None
        with self._lock:
            self.num_stored += 1
        return stored

    def describe(self) -> str:
        """Return a line about this process's use of the cache."""
        return (
            f"cache {self.folder}: {self.num_found} prepared case(s) found, {self.num_stored} added "
            "(see volseg data cache; data.cache=none turns it off)"
        )

    def _open_stored(self, key: str) -> StoredCase | None:
        path = self._path(key)
        try:
            stored = StoredCase.open(path)
            with self._lock:
                self._verified_bytes -= stored.size
                is_verified = self._verified_bytes >= 0
            if is_verified:
                stored.require_whole()
        except FileNotFoundError:
            return None
        except DamagedCaseError as fault:
            logger.warning("%s; the case is prepared again", fault)
            with suppress(OSError):  # for a read-only folder
                path.unlink(missing_ok=True)
            return None
        except OSError as fault:  # no permission to read it, or no address space
            logger.warning("%s cannot be opened (%s); the case is prepared again", path, fault.strerror or fault)
            return None
        stored.mark_used()
        with self._lock:
            self.num_found += 1
        return stored

    @contextmanager
    def _only_maker(self, key: str) -> Iterator[None]:
        """Hold a lock that the system releases when its holder ends in any way; without locks, hold nothing."""
        descriptor = None
        try:
            # One lock for many keys: a file per case could not be removed without a race.
            path = self.folder / "locks" / key[:2]
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a folder or file system without locks: a case may be made twice, with the same bits
            pass
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _make_room(self, needed: int) -> None:
        """Remove the least recently used cases until a new file has room; the caller holds the lock.

        Raises
        ------
        OSError
            If there is too little room, with the reason.
        """
        entries = list_entries(self.folder)  # each time, since other processes store and remove cases too
        used = sum(entry.size for entry in entries)
        excess = self._measure_excess(used + needed)
        if excess > 0:
            remove_partials(self.folder, "*/.*.partial", time.time() - PARTIAL_SECONDS)
            excess = self._measure_excess(used + needed)
        for entry in entries:
            if excess <= 0 or entry.used > time.time() - KEPT_SECONDS:
                break
            entry.path.unlink(missing_ok=True)
            used -= entry.size
            excess -= entry.size
        if excess > 0:
            raise OSError(
                errno.ENOSPC,
                f"{excess / GIB:.2f} GiB too little: cases use {used / GIB:.1f} of {self.limit_bytes / GIB:.0f} GiB "
                f"(data.cache_limit), and a tenth of the disk, {LEFT_FREE_BYTES // GIB} GiB at most, stays free",
            )

    def _measure_excess(self, used: int) -> int:
        disk = shutil.disk_usage(self.folder)
        left_free = min(int(LEFT_FREE_SHARE * disk.total), LEFT_FREE_BYTES)
        return max(used - self.limit_bytes, left_free - disk.free)

    def _stop_writing(self, fault: Exception) -> None:
        with self._lock:
            was_writing, self._writes = self._writes, False
        if was_writing:
            reason = (fault.strerror if isinstance(fault, OSError) else None) or fault
            logger.warning(
                "prepared cases are no longer stored in %s (%s); each process keeps its own in memory, and the next "
                "training prepares them again. Make room with `volseg data cache clear`, or change data.cache",
                self.folder,
                reason,
            )

    def _path(self, key: str) -> Path:
        return self.folder / "cases" / f"{key}{SUFFIX}"


def pack_case(prepared: Case, case: Case, num_classes: int, *, is_sparse: bool) -> Case:
    """Return a prepared case with the places of its labels, as it is stored; `take_case` is the inverse.

    Raises
    ------
    DataError
        If it does not fit a `VolumeCache`.
    """
    require_fit(str(case["case"]), prepared["image"], prepared["label"], len(prepared["image"]))
    found = list_voxels(prepared["label"].as_subclass(Tensor), num_classes, is_sparse=is_sparse)
    return {**prepared, "voxels": {name: (of.voxels, of.count) for name, of in found.items()}}


def take_case(stored: StoredCase, case: Case, *, keep_reference: bool) -> Case:
    """Return a stored case in the form of a prepared case; see `volseg.data.case_store.preparing.prepare`.

    It also has ``mapped``, the file. A training case has ``image`` and ``label`` without metadata, and ``voxels`` from
    `list_voxels`.
    """
    volumes = stored.volumes()
    if keep_reference:
        for name, volume in volumes.items():
            source = case["image" if name == "image" else "label"]
            if isinstance(source, str | Path):
                volume.meta["filename_or_obj"] = str(source)  # its present path
        return {**case, **volumes, "reference_file": Path(case["label"]), "mapped": stored}
    plain = {name: volume.as_subclass(Tensor) for name, volume in volumes.items() if name != "reference"}
    voxels = {name: ForegroundVoxels(*parts) for name, parts in stored.voxels.items()}
    return {**case, **plain, "voxels": voxels, "mapped": stored}


def _without_files(case: Case) -> Case:
    return {name: value for name, value in case.items() if name not in ("case", "weight", *FILES)}


def _describe_preparing(task: Task, preprocessing: Preprocessing) -> Mapping[str, Any]:
    """Return all inputs that determine the bits of a prepared case, except the case itself."""
    if preprocessing.components is None:
        raise ConfigError("only cases that build_preprocessing prepares can be stored; set data.cache to none")
    about = {field.name: getattr(task, field.name) for field in fields(task)}
    for name in ("root", "training", "test", "splits", "columns"):
        del about[name]
    about["labels"] = sorted(task.labels.items())  # JSON keys are strings
    # The number for hidden background depends on the labelled values of all cases.
    about["cases"] = sorted({_format_json(_without_files(case)) for case in task.training})
    return {
        "task": about,
        "preprocessing": preprocessing.components,
        "code": _digest_code(task, preprocessing),
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _digest_code(task: Task, preprocessing: Preprocessing) -> str:
    """Return the digest of the source code that reads, checks and prepares cases."""
    files = [file for folder in OWN_CODE for file in sorted(folder.rglob("*.py"))]
    steps = [getattr(step, "func", step) for step in preprocessing.transforms]
    factories = [PREPROCESSING[component["name"]] for component in preprocessing.components or ()]
    read = [case[field] for case in task.training for field in ("image", "label") if field in case]
    suffixes = {match_suffix(file) for field in read for file in list_files(field)}
    readers = [SUFFIXES[suffix] for suffix in suffixes if suffix is not None]
    made_of = [
        *(cls for step in steps for cls in type(step).__mro__),
        *(part for part in (*steps, *factories, *readers) if hasattr(part, "__qualname__")),
    ]
    digest = sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + sha256(file.read_bytes()).digest())
    digest.update(digest_modules({part.__module__ for part in made_of}, LIBRARIES).encode())
    return digest.hexdigest()


def _format_json(content: Any) -> str:
    """Return the same JSON for the same content; raise for values that JSON lacks, instead of their address."""
    return json.dumps(content, sort_keys=True, default=_encode_mapping)


def _encode_mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(f"the cache cannot identify cases by {type(value).__name__} {value!r}; set data.cache to none")
