"""Read and write files of named tensors, without running code from them: safetensors, and files of ``torch.save``.

The safetensors format, a header in JSON and then the numbers, is small, so this module writes it without the
safetensors library. The tests compare with that library if it is installed. Equal tensors give equal bytes.

Only `read_torch_file` calls ``torch.load``. Torch does not compare checksums, so a flipped bit would change weights
without an error: `read_torch_file` compares every checksum first. The checks and torch read the same open file, so it
cannot be replaced in between.

References
----------
.. [1] https://huggingface.co/docs/safetensors: eight bytes with the header's length, little endian; the header, JSON of
   name to dtype, shape and offsets, without gaps; the data, row by row.
"""

import json
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from volseg.data.json_files import parse_json
from volseg.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_HEADER = 100_000_000
"""Maximum size of a header in bytes; the library has the same limit."""


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return named tensors as the bytes of a safetensors file, sorted by name.

    Examples
    --------
    >>> unpack_tensors(pack_tensors({"weight": torch.tensor([[1.0, 2.0]])}), "here")
    {'weight': tensor([[1., 2.]])}
    """
    header: dict[str, Any] = {}
    parts, offset = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"safetensors cannot store {kind}, the type of {name}; use {', '.join(DTYPES)}")
        tensor = tensor.detach().cpu().contiguous()
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        end = offset + len(content)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        parts.append(content)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def unpack_tensors(content: bytes, where: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises
    ------
    CheckpointError
        If the header is damaged, a type is unknown, or data are missing, surplus or shared.
    """
    if len(content) < 8:
        raise CheckpointError(f"{where} is damaged: it has only {len(content)} bytes")
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(MOST_HEADER, len(content) - 8):
        raise CheckpointError(f"{where} is damaged: {len(content)} bytes with a header of {length} bytes")
    try:
        header = parse_json(content[8 : 8 + length])
        entries = {name: _read_entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise CheckpointError(f"{where} is damaged: its header cannot be read ({fault!r})") from fault
    data, expected, tensors = memoryview(content)[8 + length :], 0, {}
    for name, (dtype, shape, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != expected or end - start != math.prod(shape) * dtype.itemsize or end > len(data):
            raise CheckpointError(f"{where} is damaged: {name} should start at byte {expected}, got {start} to {end}")
        expected = end
        numbers = torch.frombuffer(bytearray(data[start:end]), dtype=dtype) if end > start else torch.empty(0).to(dtype)
        tensors[name] = numbers.reshape(shape)
    if expected != len(data):
        raise CheckpointError(f"{where} is damaged: {len(data) - expected} bytes belong to no tensor")
    return tensors


def _read_entry(entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    shape = tuple(int(side) for side in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    if min((*shape, start, end - start), default=0) < 0:
        raise ValueError(f"negative sizes in {entry}")
    return DTYPES[entry["dtype"]], shape, start, end


DOS_FOLDER = 0x10
"""Attribute of a part in a zip file's directory. Torch does not read such a part and returns uninitialised memory."""

SAVE_AGAIN = "torch.save(torch.load(FILE, weights_only=True), FILE)"


def read_torch_file(path: Path, device: torch.device | str = "cpu") -> Any:
    """Read a file of ``torch.save`` with tensors, plain values and numpy's numbers.

    Parameters
    ----------
    path : path
        The file.
    device : torch.device or str
        Device of the tensors.

    Raises
    ------
    CheckpointError
        If the file is absent or damaged in any bit, has no checksums (torch before 1.6), or contains anything else.
    """
    try:
        with path.open("rb") as file:
            _require_intact(file, path)
            file.seek(0)
            with torch.serialization.safe_globals(_list_numbers()):
                return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as fault:
        raise CheckpointError(
            f"{path} contains more than tensors, plain values and numpy's numbers, so it is not read: opening it could "
            f"run arbitrary code ({_name_global(fault)}). If you trust its source, load it with the program that wrote "
            "it and save only the tensors: torch.save(network.state_dict(), FILE). From a checkpoint of nnU-Net, save "
            "a dict of network_weights, init_args, trainer_name and inference_allowed_mirroring_axes"
        ) from fault
    except CheckpointError:
        raise
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault}") from fault
    except Exception as fault:  # zipfile and torch raise IndexError, KeyError, struct.error ... for damaged bytes
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"{path} is damaged, or torch.save did not write it ({reason}); copy it again") from fault


def _require_intact(file: BinaryIO, path: Path) -> None:
    """Raise unless every part of the file matches its checksum."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        if file.read(2) == b"PK":
            raise zipfile.BadZipFile("its end is missing")
        raise CheckpointError(
            f"{path} is damaged, or torch.save of torch 1.6 or later did not write it. Older files carry no checksums, "
            f"so damage would change weights without an error. If yours is an older file, save it again: {SAVE_AGAIN}"
        )
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.filename.endswith("/constants.pkl") for part in parts):
            raise CheckpointError(
                f"{path} is a TorchScript program; save its weights only: "
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
            )
        if len({part.filename for part in parts}) < len(parts):
            raise zipfile.BadZipFile("it contains a part twice")
        for part in parts:
            if part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size:
                raise zipfile.BadZipFile(f"its part {part.filename} is compressed, which torch.save never does")
            if part.is_dir() or part.external_attr & DOS_FOLDER:
                raise zipfile.BadZipFile(f"its part {part.filename} is marked as a folder")
        if (bad := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"its part {bad} does not match its checksum")


def _list_numbers() -> list[Any]:
    """Return the names that a pickle may call: they only rebuild numpy's numbers."""
    scalar: Any = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar  # type: ignore[attr-defined]
    kinds = [np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?US"]
    # numpy 2 moved the function; a checkpoint contains its path in the numpy that wrote the file.
    named = [(scalar, f"numpy.{place}.multiarray.scalar") for place in ("core", "_core")]
    return [*named, np.dtype, *{type(kind) for kind in kinds}]


def _name_global(fault: BaseException) -> str:
    """Return the class or function that the file names, from torch's long message."""
    named = re.search(r"GLOBAL \S+|<class '[^']+'>", str(fault))
    return named.group() if named else str(fault).strip().rpartition("\n")[2]
