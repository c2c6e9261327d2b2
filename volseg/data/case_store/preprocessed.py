"""Read and preprocess cases, and keep a prepared case as one file that is mapped, not read.

::

    volumes, each from a multiple of 64 bytes on | description (JSON) | its place, its SHA-256, a mark

The description is at the end and written last, so a truncated file has none. Opening such a file executes no code.
Volumes are mapped copy-on-write: the system keeps their pages once for all processes and drops them when memory is
short. A process that writes to such a tensor changes its own copy.

`SharedCases` are such files in memory: each case exists once per machine. One process writes it, the others map the
same pages. A file without a name (``memfd_create``) is opened by other processes through ``/proc/PID/fd`` while its
writer lives. The memory is freed with its last mapping, after any kind of exit: there is nothing to remove. It is no
part of ``/dev/shm``, which has 64 MB in a container.
"""

import copy
import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.labels import to_classes
from volseg.data.readers import Read, read_volume
from volseg.data.threads import compute_in_one_thread, map_in_threads
from volseg.errors import DataError
from volseg.transforms.preprocessing import Preprocessing as Composed
from volseg.transforms.preprocessing import choose_label_dtype

Preprocessing = Callable[[Case], Case]


def prepare(
    case: Case, preprocessing: Preprocessing, *, keep_reference: bool = False, task: Task | None = None
) -> Case:
    """Read ``image`` and, if the case has one, ``label``, and preprocess them.

    Parameters
    ----------
    case : Case
        The case with paths.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    keep_reference : bool
        Add the fields ``reference``, the label ``(1, D, H, W)`` as read (for comparison with a prediction), and
        ``reference_file``.
    task : Task, optional
        Task of the label's values: the label becomes class indices (`volseg.data.labels`), as a training needs it.
    """
    fields = [field for field in ("image", "label") if field in case]
    return preprocess(Read(fields, task)(case), case, preprocessing, keep_reference, task)


def preprocess(
    read: Case, paths: Case, preprocessing: Preprocessing, keep_reference: bool, task: Task | None = None
) -> Case:
    """Preprocess a case that has been read; ``paths`` is the case with paths, the rest as for `prepare`.

    A `volseg.transforms.Preprocessing` empties ``read``, so that a large volume is not held beside its results.
    """
    label = read.get("label") if keep_reference else None
    if isinstance(read.get("stage"), str | Path):
        read["stage"] = read_volume(read["stage"])
    with compute_in_one_thread():
        prepared = preprocessing.consume(read) if isinstance(preprocessing, Composed) else preprocessing(read)
    if task is not None and "label" in prepared:
        prepared["label"] = to_classes(prepared["label"], task, paths)
    if label is not None:
        # As StoreVoxels keeps labels: a quarter of the bytes read.
        prepared["reference"] = label.to(choose_label_dtype(label))
        prepared["reference_file"] = Path(paths["label"])
    return prepared


def prepare_all(cases: Sequence[Case], preprocessing: Preprocessing, *, keep_reference: bool = False) -> list[Case]:
    """Prepare cases in threads, unchecked; the parameters are those of `prepare`."""
    return list(map_in_threads(partial(prepare, preprocessing=preprocessing, keep_reference=keep_reference), cases))


MARK = b"volsegC1"
"""Last bytes of the file; the number is that of this layout."""

END = struct.Struct("<QQ32s8s")
"""First byte and length of the description, its SHA-256, and `MARK`."""

TENSOR, TUPLE = "__tensor__", "__tuple__"


class DamagedCaseError(Exception):
    """A file that is no valid stored case; it is silently made again."""


def write_case(file: BinaryIO, case: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write the tensors of a prepared case, and facts about them.

    Raises
    ------
    TypeError
        If metadata or ``about`` has values that JSON lacks.
    OSError
        As for any writing.
    """
    volumes: dict[str, Any] = {}
    for name, tensor in case.items():
        if not isinstance(tensor, Tensor):  # an id, a path: the reader of the case has them
            continue
        values = tensor.as_subclass(Tensor).detach().cpu().contiguous()
        content = view_bytes(values)
        file.write(bytes(-file.tell() % ALIGNMENT))
        volumes[name] = {
            "place": [file.tell(), str(values.dtype).removeprefix("torch."), list(values.shape)],
            "checksum": zlib.crc32(content),
            "meta": _encode(dict(tensor.meta)) if isinstance(tensor, MetaTensor) else None,
        }
        file.write(content)
    description = json.dumps({"volumes": volumes, "about": about}).encode()
    begin = file.tell()
    file.write(description + END.pack(begin, len(description), sha256(description).digest(), MARK))


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """An open stored case.

    Raises
    ------
    DamagedCaseError
        From ``open`` and ``require_whole``.
    OSError
        If the file cannot be read.
    """

    path: Path
    size: int
    identity: tuple[int, int]
    """Device and inode of the mapped file, which tell it from a later file of the same name."""
    about: Mapping[str, Any]
    _volumes: Mapping[str, Mapping[str, Any]]
    _mapped: torch.UntypedStorage = field(repr=False)
    _changed: dict[str, int] = field(repr=False)
    """``at``: last change of the file (``ctime``, ns) that is known to have kept its content."""

    @classmethod
    def open(cls, path: Path) -> "StoredCase":
        """Map a file whose description is valid and fits its size; its volumes are not checked."""
        with path.open("rb") as file:
            told_of_file = os.fstat(file.fileno())
            size, identity = told_of_file.st_size, (told_of_file.st_dev, told_of_file.st_ino)
            changed = {"at": told_of_file.st_ctime_ns}
            begin, length, digest, mark = END.unpack(_read_at(file, size - END.size, END.size))
            if mark != MARK or begin + length + END.size != size:  # reading behind the end would kill the process
                raise DamagedCaseError(f"{path} is cut off or of another layout")
            description = _read_at(file, begin, length)
            if sha256(description).digest() != digest:
                raise DamagedCaseError(f"{path} has a damaged description")
        mapped = map_file(str(path), size)
        told = json.loads(description, object_hook=_decode)
        return cls(
            path=path,
            size=size,
            identity=identity,
            about=told["about"],
            _volumes=told["volumes"],
            _mapped=mapped,
            _changed=changed,
        )

    def mark_used(self) -> None:
        """Set the file's dates: the least recently used cases are removed first."""
        with suppress(OSError):  # for a read-only folder
            os.utime(self.path)
            self._changed["at"] = self.path.stat().st_ctime_ns

    def require_unchanged(self) -> None:
        """Check whether the mapped file was changed; if so, compare its volumes with their checksums.

        ``ctime`` cannot be set, so a file that was overwritten and given its old date is noticed too. Another training
        that uses the case changes only the date.

        Raises
        ------
        DataError
            If the file was truncated or overwritten.
        """
        try:
            told = self.path.stat()
        except OSError:  # removed, or not visible now: the mapping stays valid
            return
        if (told.st_dev, told.st_ino) != self.identity:  # another file of that name
            return
        if told.st_size >= self.size and told.st_ctime_ns == self._changed["at"]:
            return
        try:
            if told.st_size < self.size:  # reading a page behind its end would kill the process
                raise DamagedCaseError(f"it had {self.size} bytes and has {told.st_size}")
            self.require_whole()
        except DamagedCaseError as fault:
            raise DataError(
                f"{self.path}, the prepared case of {self.about.get('case')}, was overwritten while it was used: "
                f"{fault}; continue with --resume, which prepares the case again"
            ) from None
        self._changed["at"] = told.st_ctime_ns

    def require_whole(self) -> None:
        """Compare every byte with its checksum."""
        for name, told in self._volumes.items():
            if zlib.crc32(view_bytes(self.tensor(name))) != told["checksum"]:
                raise DamagedCaseError(f"the {name} in {self.path} is not what was written")

    def tensor(self, name: str) -> Tensor:
        """Return a volume without its metadata."""
        begin, dtype, shape = self._volumes[name]["place"]
        values = torch.empty(0, dtype=getattr(torch, dtype))
        return values.set_(self._mapped, begin // values.element_size(), shape)  # type: ignore[call-overload]

    def volumes(self) -> Case:
        """Return all volumes, with their metadata."""
        metas = {name: told["meta"] for name, told in self._volumes.items()}
        return {
            name: self.tensor(name) if meta is None else MetaTensor(self.tensor(name), meta=copy.deepcopy(meta))
            for name, meta in metas.items()
        }


def _read_at(file: BinaryIO, begin: int, count: int) -> bytes:
    if begin < 0:
        raise DamagedCaseError(f"{file.name} is cut off")
    file.seek(begin)
    content = file.read(count)
    if len(content) < count:
        raise DamagedCaseError(f"{file.name} is cut off")
    return content


def _encode(value: Any) -> Any:
    """Return metadata as values for JSON; numbers keep every bit."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):  # also an enumeration of strings
        return str(value)
    if isinstance(value, np.generic):
        return _encode(value.item())
    if isinstance(value, Tensor | np.ndarray):
        values = torch.as_tensor(value)
        return {TENSOR: [values.tolist(), str(values.dtype).removeprefix("torch."), isinstance(value, Tensor)]}
    if isinstance(value, tuple):
        return {TUPLE: [_encode(part) for part in value]}
    if isinstance(value, list):
        return [_encode(part) for part in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encode(part) for key, part in value.items()}
    raise TypeError(f"metadata of the type {type(value).__name__} cannot be stored")


def _decode(content: dict[str, Any]) -> Any:
    """Return the value of a JSON object, whose inner objects are decoded."""
    if TUPLE in content:
        return tuple(content[TUPLE])
    if TENSOR in content:
        numbers, dtype, is_tensor = content[TENSOR]
        values = torch.tensor(numbers, dtype=getattr(torch, dtype))
        return values if is_tensor else values.numpy()
    return content


ALIGNMENT = 64
"""Bytes; the alignment of torch's own memory."""


def can_share() -> bool:
    """Return whether this platform supports sharing."""
    return hasattr(os, "memfd_create") and os.path.isdir(f"/proc/{os.getpid()}/fd")


class SharedCases:
    """Stored cases in the memory of this process, which the processes of its machine map.

    Their files stay open until ``close``; the other processes must have mapped them by then.
    """

    def __init__(self) -> None:
        import resource  # which other systems lack

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a file per case
        self._files: list[int] = []

    def add(self, case: Mapping[str, Any], about: Mapping[str, Any]) -> str:
        """Write a case as `write_case` does; return the path for `StoredCase.open` in another process. Thread-safe."""
        try:
            file = os.memfd_create("volseg", os.MFD_CLOEXEC)
        except OSError as fault:
            if fault.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise DataError(
                f"{len(self._files)} cases are in shared memory, an open file each, and no more may be open; "
                "raise the limit (ulimit -n), or name a folder by data.cache, whose cases take none"
            ) from fault
        self._files.append(file)
        with open(file, "wb", closefd=False) as writer:
            write_case(writer, case, about)
        return f"/proc/{os.getpid()}/fd/{file}"

    def close(self) -> None:
        """Close the files; mappings stay valid."""
        while self._files:
            os.close(self._files.pop())


def view_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def map_file(path: str, size: int) -> torch.UntypedStorage:
    """Map the first bytes of a file copy-on-write; the mapping lives as long as one of its tensors.

    Raises
    ------
    OSError
        If the file is gone or unreadable, or the address space is exhausted.
    """
    try:
        # Not Python's mmap, which keeps a descriptor for each: a process may have a thousand of them.
        mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=size)
    except RuntimeError as fault:
        raise OSError(errno.ENOMEM, str(fault).partition("\n")[0]) from fault
    storage: torch.UntypedStorage = mapped
    return storage
