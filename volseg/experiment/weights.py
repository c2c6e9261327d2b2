"""Open files of weights: checkpoints outside of their run, nnU-Net's, safetensors, and any ``state_dict``.

Each kind of file has one reader, which compares checksums before it reads a value, if the file has any. If that reader
refuses a file, no other reader tries it.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from volseg.checkpointing.file import parse_checkpoint
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.nnunet.checkpoint import parse_nnunet
from volseg.exchange.nnunet.folder import read_alone
from volseg.exchange.tensors import unpack_tensors
from volseg.exchange.torch_file import read_torch_file
from volseg.experiment.imported import open_nnunet
from volseg.experiment.trained import SourceNetwork
from volseg.files import digest_file

__all__ = ["find_weights", "open_weights"]

SUFFIXES = (".pt", ".pth", ".ckpt", ".tar", ".bin", ".ts", ".safetensors")
"""Of files that hold weights; a file of ``torch.save`` may have another one."""

CONTAINERS = ("state_dict", "network_weights", "model", "model_state_dict")
"""Keys under which others keep a ``state_dict``: Lightning, nnU-Net, and many scripts."""


def find_weights(path: Path) -> Path | None:
    """Return the file of weights that a path means, which may be a MONAI bundle; None if it means none."""
    if (path / "configs").is_dir() and (path / "models").is_dir():
        candidates = [path / "models" / name for name in ("model.pt", "model.ts")]
        return next((file for file in candidates if file.is_file()), None)
    is_weights = path.is_file() and (path.suffix.lower() in SUFFIXES or zipfile.is_zipfile(path))
    return path if is_weights else None


def open_weights(file: Path, overrides: Sequence[str] = ()) -> Iterator[SourceNetwork]:
    """Yield the network of a file; only a checkpoint of nnU-Net says which network it is.

    Raises
    ------
    CheckpointError
        If the file is damaged, holds no weights, or cannot be read without running code.
    """
    weights = SourceNetwork(source=file, file=file, values={}, digest=digest_file(file))
    if file.suffix.lower() == ".safetensors":  # it carries no checksum, so start.json keeps its digest
        values = unpack_tensors(file.read_bytes(), str(file))
        if not values:
            raise CheckpointError(f"{file} holds no weights; name another file")
        yield replace(weights, values=values)
        return
    content = read_torch_file(file)
    if (state := parse_checkpoint(content, file)) is not None:
        yield replace(weights, values=state.model, average=state.averaged)
        return
    unknown = weights.unknown
    if isinstance(content, Mapping) and {"network_weights", "init_args", "trainer_name"} <= content.keys():
        try:
            yield from open_nnunet(read_alone(file, parse_nnunet(content, file)), overrides)
            return
        except ConfigError as fault:  # a network of its own may take these weights by their own names
            unknown = str(fault)
    yield replace(weights, values=_find_state_dict(content, file), unknown=unknown)


def _find_state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the ``state_dict`` in a file of another program."""
    for _ in CONTAINERS:  # one may hold another, and a damaged one may hold itself
        found = [key for key in CONTAINERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        if not found:
            break
        if len(found) > 1:
            raise CheckpointError(
                f"{path} holds weights under {' and '.join(found)}; save the ones that you want: "
                "torch.save(network.state_dict(), FILE)"
            )
        content = content[found[0]]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no state_dict, which maps names to tensors")
    if odd := [name for name in content if not isinstance(name, str)]:
        raise CheckpointError(f"{path} should map names to tensors, got the key {odd[0]!r}")
    return content
