"""Write checkpoint files atomically, and read them without running code.

A checkpoint is one ``torch.save`` file of tensors and plain values. It is written under a temporary name, flushed to
disk and renamed, so a full disk or a lost machine leaves the last good checkpoint in place. `read_torch_file` reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from volseg.checkpointing.state import FORMAT, TrainingState
from volseg.errors import CheckpointError
from volseg.exchange.tensors import read_torch_file
from volseg.files import replacing

LATEST, PREVIOUS, BEST = "latest.pt", "previous.pt", "best.pt"
"""The newest state; the previous ``latest.pt``; the state after the epoch with the best score."""

CHECKPOINTS = {"latest": LATEST, "best": BEST, "previous": PREVIOUS}
"""Names of checkpoints for a prediction, and their files."""


def save_checkpoint(
    state: TrainingState | Mapping[str, Any],
    path: str | Path,
    *,
    previous: str | Path | None = None,
    make_folder: bool = True,
) -> Path:
    """Write a training's state to ``path`` atomically.

    Parameters
    ----------
    state : TrainingState or mapping
        State to write; a mapping is the result of `Training.state_dict`.
    path : path
    previous : path, optional
        Path, in the same folder, for the former checkpoint at ``path``.
    make_folder : bool
        Create a missing folder.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; a former checkpoint at ``path`` stays in place.
    """
    path = Path(path)
    content = TrainingState.from_checkpoint(state, f"what is to be written to {path}").as_checkpoint()
    try:
        # Into an open file: given a path, torch writes in C++ without releasing Python to the training.
        with (
            replacing(path, previous=previous, make_folder=make_folder) as partial,
            partial.open("wb") as file,
        ):
            torch.save({"format": FORMAT, **content}, file)
    except (OSError, RuntimeError) as fault:
        # On a full disk torch's writer hides the system's error behind one about the position in the file.
        reason = fault.__context__ if isinstance(fault.__context__, OSError) else fault
        kept = "the one written before is still there" if path.exists() else "no earlier one exists"
        raise CheckpointError(
            f"checkpoint {path} could not be written ({reason}); {kept}. Free space or choose another output folder, "
            "then continue with --resume"
        ) from fault
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read a checkpoint of the current format that ``save_checkpoint`` wrote.

    Raises
    ------
    CheckpointError
        If the file is absent, damaged, of another format or incomplete, or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}; train first, or name another run folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is no file and hence no checkpoint; remove it, or name another run folder")
    state = parse_checkpoint(read_torch_file(path, device), path)
    if state is None:
        raise CheckpointError(f"{path} holds no volseg checkpoint; expected the keys that `volseg train` writes")
    return state


def parse_checkpoint(content: Any, path: Path) -> TrainingState | None:
    """Return the training's state in a file's content; None if it holds none.

    Raises
    ------
    CheckpointError
        If the state is of another format or incomplete.
    """
    layout = content.get("format") if isinstance(content, Mapping) else None
    if isinstance(layout, int):
        if layout != FORMAT:
            raise CheckpointError(f"{path} has format {layout}, this volseg reads {FORMAT}: update volseg")
    elif not (isinstance(content, Mapping) and isinstance(content.get("model"), Mapping) and "average" in content):
        return None  # neither a file of `save_checkpoint` nor a result of `Training.state_dict`
    return TrainingState.from_checkpoint(content, path)
