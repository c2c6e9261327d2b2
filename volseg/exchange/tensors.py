"""Pack named tensors into the safetensors format: a header in JSON, then the numbers, without code.

The format is small, so this module writes it without the safetensors library. The tests compare with that library if
it is installed. Equal tensors give equal bytes.

References
----------
.. [1] https://huggingface.co/docs/safetensors: eight bytes with the header's length, little endian; the header, JSON
of
   name to dtype, shape and offsets, without gaps; the data, row by row.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from volseg.data.json_files import parse_json
from volseg.errors import CheckpointError

__all__ = ["pack_tensors", "unpack_tensors"]


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
"""Bytes of a header; the library's own limit."""


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
            raise CheckpointError(f"{name} holds {kind}, which safetensors has no name for; it has {', '.join(DTYPES)}")
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
        raise CheckpointError(f"{where} is damaged: {len(content)} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(MOST_HEADER, len(content) - 8):
        raise CheckpointError(f"{where} is damaged: a header of {length} bytes in a file of {len(content)}")
    try:
        header = parse_json(content[8 : 8 + length])
        entries = {name: _read_entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise CheckpointError(f"{where} is damaged: its header cannot be read ({fault!r})") from fault
    data, expected, tensors = memoryview(content)[8 + length :], 0, {}
    for name, (dtype, shape, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != expected or end - start != math.prod(shape) * dtype.itemsize or end > len(data):
            raise CheckpointError(f"{where} is damaged: {name} should lie at bytes {expected} on, got {start} to {end}")
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
