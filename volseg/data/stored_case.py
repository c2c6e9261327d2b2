"""A prepared case as one file that is mapped, not read.

::

    volumes, each from a multiple of 64 bytes on | description (JSON) | its place, its SHA-256, a mark

The description stands at the end, where it is written last, so a file that is cut off anywhere has none. Nothing is
executed by opening such a file. Volumes are mapped copy-on-write: the system keeps their pages once for all processes
and drops them when memory is short, and who writes to such a tensor changes a copy of his own.
"""

import copy
import json
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.shared_memory import ALIGNMENT, map_file, place_of, view_bytes, view_tensor
from volseg.errors import DataError
from volseg.fields import Case

__all__ = ["DamagedCaseError", "StoredCase", "write_case"]

MARK = b"volsegC1"
"""Ends the file; its number is that of this layout."""

END = struct.Struct("<QQ32s8s")
"""First byte and length of the description, its SHA-256, and `MARK`."""

TENSOR, TUPLE = "__tensor__", "__tuple__"


class DamagedCaseError(Exception):
    """A file that is not, or no longer, a stored case; it is made again and nobody is told."""


def write_case(file: BinaryIO, case: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write the tensors of a prepared case, and what is said about them.

    Raises
    ------
    TypeError
        If metadata or ``about`` holds what JSON cannot say.
    OSError
        As of any writing.
    """
    volumes: dict[str, Any] = {}
    for name, tensor in case.items():
        if not isinstance(tensor, Tensor):  # an id, a path: whoever opens the case has them
            continue
        values = tensor.as_subclass(Tensor).detach().cpu().contiguous()
        content = view_bytes(values)
        file.write(bytes(-file.tell() % ALIGNMENT))
        volumes[name] = {
            "place": place_of(values, file.tell()),
            "checksum": zlib.crc32(content),
            "meta": _encode(dict(tensor.meta)) if isinstance(tensor, MetaTensor) else None,
        }
        file.write(content)
    description = json.dumps({"volumes": volumes, "about": about}).encode()
    begin = file.tell()
    file.write(description + END.pack(begin, len(description), sha256(description).digest(), MARK))


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A stored case that has been opened.

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
    """Device and inode of the file that is mapped, whatever is called like it later."""
    about: Mapping[str, Any]
    _volumes: Mapping[str, Mapping[str, Any]]
    _mapped: torch.UntypedStorage = field(repr=False)
    _changed: dict[str, int] = field(repr=False)
    """``at``: when the file was last changed (``ctime``, ns), as far as that is known to have kept its content."""

    @classmethod
    def open(cls, path: Path) -> "StoredCase":
        """Map a file whose description is whole and fits its size; its volumes are not looked at."""
        with path.open("rb") as file:
            told_of_file = os.fstat(file.fileno())
            size, identity = told_of_file.st_size, (told_of_file.st_dev, told_of_file.st_ino)
            changed = {"at": told_of_file.st_ctime_ns}
            begin, length, digest, mark = END.unpack(_read_at(file, size - END.size, END.size))
            if mark != MARK or begin + length + END.size != size:  # a page behind the file's end cannot be touched
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
        """Set the file's dates, by which the cases that were used longest ago are removed first."""
        with suppress(OSError):  # where only reading is allowed
            os.utime(self.path)
            self._changed["at"] = self.path.stat().st_ctime_ns

    def require_unchanged(self) -> None:
        """Look whether the mapped file was changed; if so, compare its volumes with their checksums.

        Nobody can set ``ctime``, so a file that was overwritten and got its old date back is noticed too. Another
        training that takes the case changes the date and nothing else.

        Raises
        ------
        DataError
            If the file was cut off or overwritten.
        """
        try:
            told = self.path.stat()
        except OSError:  # removed, or not to be seen now: what is mapped lives on
            return
        if (told.st_dev, told.st_ino) != self.identity:  # another file of that name
            return
        named = f"{self.path}, the prepared case of {self.about.get('case')},"
        if told.st_size < self.size:  # touching a page behind its end would end the process
            raise DataError(
                f"{named} was cut off while it was used: it had {self.size} bytes and has {told.st_size}; go on with "
                "--resume, which prepares the case anew"
            )
        if told.st_ctime_ns == self._changed["at"]:
            return
        try:
            self.require_whole()
        except DamagedCaseError as fault:
            raise DataError(
                f"{named} was overwritten while it was used: {fault}; go on with --resume, which prepares the case anew"
            ) from None
        self._changed["at"] = told.st_ctime_ns

    def require_whole(self) -> None:
        """Compare every byte with its checksum."""
        for name, told in self._volumes.items():
            if zlib.crc32(view_bytes(self.tensor(name))) != told["checksum"]:
                raise DamagedCaseError(f"the {name} in {self.path} is not what was written")

    def tensor(self, name: str) -> Tensor:
        """Return a volume without its metadata."""
        return view_tensor(self._mapped, self._volumes[name]["place"])

    def volumes(self) -> Case:
        """Return all volumes, with the metadata that they came with."""
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
    """Return metadata as JSON can say it; numbers keep every bit."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):  # an enumeration of strings too
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
    """Return what an object of JSON stands for; those inside it are decoded already."""
    if TUPLE in content:
        return tuple(content[TUPLE])
    if TENSOR in content:
        numbers, dtype, is_tensor = content[TENSOR]
        values = torch.tensor(numbers, dtype=getattr(torch, dtype))
        return values if is_tensor else values.numpy()
    return content
