"""Read the weights that a training starts from, and what is known of the run that wrote them.

Each kind of file has one reader, which compares checksums before it reads a value. If that reader refuses a file, no
other reader tries it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from volseg.checkpointing.file import LATEST, load_checkpoint, parse_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.state import TrainingState
from volseg.data.cases import Task
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.archive import is_archive
from volseg.exchange.tensors import unpack_tensors
from volseg.exchange.torch_file import read_torch_file
from volseg.experiment.imported import open_archive

__all__ = ["Weights", "read_weights"]

CONTAINERS = ("state_dict", "network_weights", "model")
"""Keys under which others keep a ``state_dict``: Lightning, nnU-Net, and many scripts."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights from a file; `volseg.models.weights` loads them into a network."""

    file: Path
    values: Mapping[str, Any]
    """A ``state_dict``."""
    average: Mapping[str, Tensor] | None = None
    """Of the parameters, if the training kept one."""
    task: Task | None = None
    """Task of the run that wrote them, if it is known."""
    cases: frozenset[str] = frozenset()
    """Cases that this run trained on, if they are known."""


def read_weights(path: Path) -> Weights:
    """Return the weights of a run's latest checkpoint, a checkpoint, an exported run, or a file with a ``state_dict``.

    Raises
    ------
    ConfigError
        If ``path`` is none of these.
    CheckpointError
        If the file is damaged, or cannot be read without running code.
    """
    if path.is_dir():
        folder = RunFolder(path)
        folder.config()  # raises for a folder that is no run
        return _read_run(folder.checkpoints / LATEST, load_checkpoint(folder.checkpoints / LATEST))
    if not path.is_file():
        raise ConfigError(
            f"training.start_from: {path} does not exist; name a run folder, a checkpoint, a file of volseg export or "
            "a state_dict"
        )
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"training.start_from: {path} carries no checksums, so damage would change weights without an error; "
            "convert it once by torch.save(safetensors.torch.load_file(FILE), 'weights.pt')"
        )
    if is_archive(path):
        return _read_archive(path)
    content = read_torch_file(path)
    if (state := parse_checkpoint(content, path)) is not None:
        return _read_run(path, state)
    return Weights(file=path, values=_find_state_dict(content, path))


def _read_run(file: Path, state: TrainingState) -> Weights:
    """Return the weights of a checkpoint, with its task and cases if the file is in the folder of its run."""
    weights = Weights(file=file, values=state.model, average=state.averaged)
    folder = RunFolder(file.absolute().parent.parent)
    if not (folder.exists and file.absolute().parent == folder.checkpoints.absolute()):
        return weights
    return replace(weights, task=folder.task(), cases=frozenset(folder.split().training))


def _read_archive(path: Path) -> Weights:
    with open_archive(path) as archive:
        if len(archive.networks) != 1:
            raise ConfigError(
                f"training.start_from: {path} holds {len(archive.networks)} networks; export the run of one fold and "
                "name that file"
            )
        [(run, weights)] = archive.networks
        return Weights(file=path, values=unpack_tensors(weights, str(path)), task=run.task())


def _find_state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the ``state_dict`` in a file of another program."""
    for _ in CONTAINERS:  # one may hold another, and a damaged one may hold itself
        found = [key for key in CONTAINERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        if not found:
            break
        if len(found) > 1:
            raise CheckpointError(
                f"training.start_from: {path} holds weights under {' and '.join(found)}; save the ones that you want: "
                "torch.save(network.state_dict(), FILE)"
            )
        content = content[found[0]]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"training.start_from: {path} holds no state_dict, which maps names to tensors")
    if odd := [name for name in content if not isinstance(name, str)]:
        raise CheckpointError(f"training.start_from: {path} should map names to tensors, got the key {odd[0]!r}")
    return content
