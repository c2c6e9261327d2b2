"""Read and preprocess cases, and store each prepared case as one file that is mapped, not read.

``torch.save`` writes the file as a zip archive with a checksum of each volume. Its list of contents is written last, so
a truncated file has none. Opening such a file executes no code.
Volumes are mapped copy-on-write: the system keeps their pages once for all processes and drops them when memory is
short. A process that writes to such a tensor changes its own copy.
"""

import copy
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

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

    A `volseg.transforms.Preprocessing` empties ``read``, so that a large volume and its results are not both in memory.
    """
    label = read.get("label") if keep_reference else None
    if isinstance(read.get("stage"), str | Path):
        read["stage"] = read_volume(read["stage"])
    with compute_in_one_thread():
        prepared = preprocessing.consume(read) if isinstance(preprocessing, Composed) else preprocessing(read)
    if task is not None and "label" in prepared:
        prepared["label"] = to_classes(prepared["label"], task, paths)
    if label is not None:
        # The type of StoreVoxels: a quarter of the bytes that were read.
        prepared["reference"] = label.to(choose_label_dtype(label))
        prepared["reference_file"] = Path(paths["label"])
    return prepared


def prepare_all(cases: Sequence[Case], preprocessing: Preprocessing, *, keep_reference: bool = False) -> list[Case]:
    """Prepare cases in threads, unchecked; the parameters are those of `prepare`."""
    return list(map_in_threads(partial(prepare, preprocessing=preprocessing, keep_reference=keep_reference), cases))


class DamagedCaseError(Exception):
    """Error of a stored case whose file is damaged; the case is prepared again."""


def write_case(file: BinaryIO, case: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write the tensors of a prepared case, its ``voxels`` (two tensors for each name), and facts about it.

    Raises
    ------
    TypeError
        If metadata or ``about`` has values other than tensors, arrays, numbers, texts, and collections of these.
    OSError
        If the file cannot be written.
    """
    # The reader of the case knows its id and paths.
    tensors = {name: value for name, value in case.items() if isinstance(value, Tensor)}
    content = {
        "volumes": {name: _pack(tensor) for name, tensor in tensors.items()},
        "metas": {name: _plain(dict(of.meta)) if isinstance(of, MetaTensor) else None for name, of in tensors.items()},
        "voxels": {name: tuple(map(_pack, parts)) for name, parts in case.get("voxels", {}).items()},
        "about": _plain(about),
    }
    try:
        torch.save(content, file)
    except RuntimeError as fault:  # torch's own error hides the reason
        raise (fault.__context__ if isinstance(fault.__context__, OSError) else fault) from None


def _pack(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in memory of its own: a part of a volume would be stored with the whole."""
    values = tensor.as_subclass(Tensor).detach().cpu().contiguous()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _plain(value: Any) -> Any:
    """Return metadata as values that a file without code can store; arrays become tensors."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    for plain in (str, bool, int, float):
        if isinstance(value, plain):  # also an enumeration, whose type is code
            return plain(value)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item())
    if isinstance(value, Tensor | np.ndarray):
        return _pack(torch.as_tensor(value))
    if value is None:
        return None
    raise TypeError(f"metadata of the type {type(value).__name__} cannot be stored")


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
    """Device and inode of the mapped file, which distinguish it from a later file of the same name."""
    about: Mapping[str, Any]
    voxels: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)
    """Voxels of each list of places, and their number by class; see `volseg.data.case_store.case_cache.pack_case`."""
    _volumes: Mapping[str, Tensor] = field(repr=False)
    _metas: Mapping[str, Mapping[str, Any] | None] = field(repr=False)
    _changed: dict[str, int] = field(repr=False)
    """``at``: last change of the file (``ctime``, ns) that is known to have kept its content."""

    @classmethod
    def open(cls, path: Path) -> "StoredCase":
        """Map a file after checking its description; its volumes are not checked."""
        told = path.stat()
        if not told.st_size:  # an empty file cannot be mapped
            raise DamagedCaseError(f"{path} is empty")
        try:
            with ZipFile(path) as file:
                file.read("archive/data.pkl")  # compares its checksum, which torch does not
            content = torch.load(path, mmap=True, weights_only=True)
            volumes, metas, voxels, about = (content[name] for name in ("volumes", "metas", "voxels", "about"))
        except Exception as fault:  # damaged bytes may raise anything
            if isinstance(fault, OSError) and fault.errno != errno.EINVAL:  # a damaged offset
                raise
            raise DamagedCaseError(f"{path} is truncated, or was changed after it was written") from fault
        return cls(
            path=path,
            size=told.st_size,
            identity=(told.st_dev, told.st_ino),
            about=about,
            voxels=voxels,
            _volumes=volumes,
            _metas=metas,
            _changed={"at": told.st_ctime_ns},
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
            if told.st_size < self.size:  # reading a page beyond its end would kill the process
                raise DamagedCaseError(f"it had {self.size} bytes and now has {told.st_size}")
            self.require_whole()
        except DamagedCaseError as fault:
            raise DataError(
                f"{self.path}, the prepared case of {self.about.get('case')}, was overwritten while it was used: "
                f"{fault}; continue with --resume, which prepares the case again"
            ) from None
        self._changed["at"] = told.st_ctime_ns

    def require_whole(self) -> None:
        """Compare every byte of the file with its checksum."""
        try:
            with ZipFile(self.path) as file:
                is_whole = file.testzip() is None
        except OSError:
            raise
        except Exception:  # damaged bytes may raise anything
            is_whole = False
        if not is_whole:
            raise DamagedCaseError(f"the content of {self.path} was changed after it was written")

    def volumes(self) -> Case:
        """Return all volumes, with their metadata."""
        return {
            name: volume if (meta := self._metas[name]) is None else MetaTensor(volume, meta=copy.deepcopy(meta))
            for name, volume in self._volumes.items()
        }
