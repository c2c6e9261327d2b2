"""Write checkpoint files atomically, also in the background, read them without running code, and restore a training.

A checkpoint is one ``torch.save`` file of tensors and plain values. It is written under a temporary name, flushed to
disk and renamed, so a full disk or a lost machine leaves the last good checkpoint in place. `read_torch_file` reads it.
"""

import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.checkpointing.state import FORMAT, TrainingState
from volseg.errors import CheckpointError
from volseg.exchange.tensors import read_torch_file
from volseg.files import replacing
from volseg.models.weights import load_weights
from volseg.parallel import ModelParallel
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import CommonSeeds

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
    content = TrainingState.from_checkpoint(state, f"the state for {path}").as_checkpoint()
    try:
        # Into an open file: given a path, torch writes in C++ without releasing Python to the training.
        with replacing(path, previous=previous, make_folder=make_folder) as partial, partial.open("wb") as file:
            torch.save({"format": FORMAT, **content}, file)
    except (OSError, RuntimeError) as fault:
        # On a full disk torch's writer hides the system's error behind one about the position in the file.
        reason = fault.__context__ if isinstance(fault.__context__, OSError) else fault
        kept = "the previous one is still there" if path.exists() else "no earlier one exists"
        raise CheckpointError(
            f"checkpoint {path} could not be written ({reason}); {kept}. Free space, or move the run folder to another "
            "disk (--output), then continue with --resume"
        ) from fault
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read a checkpoint of the current format that ``save_checkpoint`` wrote.

    Raises
    ------
    CheckpointError
        If the file is absent, damaged, incomplete, of another format, or contains more than tensors and plain values.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}; train first, or name another run folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file, so it is not a checkpoint; remove it, or name another run folder")
    state = parse_checkpoint(read_torch_file(path, device), path)
    if state is None:
        raise CheckpointError(f"{path} is not a volseg checkpoint: it lacks the keys that `volseg train` writes")
    return state


def parse_checkpoint(content: Any, path: Path) -> TrainingState | None:
    """Return the training's state in a file's content; None if it has none.

    Raises
    ------
    CheckpointError
        If the state is of another format or incomplete.
    """
    layout = content.get("format") if isinstance(content, Mapping) else None
    if isinstance(layout, int):
        if layout != FORMAT:
            raise CheckpointError(f"{path} has format {layout}, not {FORMAT}; use the volseg that wrote it")
    elif not (isinstance(content, Mapping) and isinstance(content.get("model"), Mapping) and "average" in content):
        return None  # neither a file of `save_checkpoint` nor a result of `Training.state_dict`
    return TrainingState.from_checkpoint(content, path)


# Restore a saved state part by part, including all random generators; errors name the part that does not fit.


NOT_WHOLE = "the checkpoint is incomplete"


class Average(Protocol):
    """Averaged weights."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Restore the averages."""


def restore(
    state: TrainingState,
    network: nn.Module,
    optimizer: Optimizer,
    average: Average | None,
    scaler: torch.amp.GradScaler,
) -> None:
    """Load a state into the parts of a training, and set the random number generators.

    Raises
    ------
    CheckpointError
        The message names the part that does not fit or is incomplete.
    """
    with _naming("model"):
        load_weights(network, state.model)
    with _naming("optimizer"):
        optimizer.load_state_dict(dict(state.optimizer))
        _lay_out_like_parameters(optimizer)
    _require_whole(state, optimizer)
    with _naming("average"):
        if (state.average is None) != (average is None):
            raise ValueError("only one of checkpoint and training has averaged weights (training.ema)")
        if average and state.average:
            average.load_state_dict(state.average)
    with _naming("scaler"):
        scaler.load_state_dict(dict(state.scaler))
    with _naming("random"):
        restore_random_state(state.random, network)


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Turn any error of a part of a state into a `CheckpointError` that names the part."""
    try:
        yield
    except Exception as fault:  # networks, optimizers and generators raise different types
        reason = str(fault) if isinstance(fault, ValueError | RuntimeError) else f"{type(fault).__name__}: {fault}"
        raise CheckpointError(f"the checkpoint does not fit this network and optimizer: {part}: {reason}") from fault


def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give the optimizer's tensors the memory layout of its parameters.

    The training that saved the tensors may have used another layout. Fused optimizers read both in the same order: for
    other layouts torch raises on a GPU, and computes wrong numbers on a CPU.
    """
    for parameter, remembered in optimizer.state.items():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.layout is torch.strided:
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if laid_out.stride() != value.stride():
                    remembered[name] = laid_out.copy_(value)


def _require_whole(state: TrainingState, optimizer: Optimizer) -> None:
    """Raise if parts of a state are inconsistent, or an optimizer's tensors are missing."""
    for part, batches in (("losses", state.losses), ("cases", state.cases)):
        if len(batches) != state.position:
            raise CheckpointError(f"{NOT_WHOLE}: {part}: {len(batches)} batches, but position is {state.position}")
    if not state.steps_done:
        return
    entries = state.optimizer["state"]
    for group, saved in zip(optimizer.param_groups, state.optimizer["param_groups"], strict=True):
        wanted = _remembered(optimizer, group)
        # A parameter that never had a gradient has no entry; if no parameter has an entry, the state is incomplete.
        for parameter in saved["params"] if not entries else [one for one in saved["params"] if one in entries]:
            if lost := sorted(wanted - {*entries.get(parameter, ())}):
                raise CheckpointError(
                    f"{NOT_WHOLE}: optimizer: after {state.steps_done} steps parameter "
                    f"{parameter} lacks the {lost[0]} that {type(optimizer).__name__} stores"
                )


def _remembered(optimizer: Optimizer, group: dict[str, Any]) -> set[str]:
    """Return the names of the optimizer's state per parameter of a group, from a step on a test parameter."""
    if not type(optimizer).__module__.startswith("torch.optim"):  # the step of a custom optimizer may do anything
        return set()
    alone = torch.zeros_like(group["params"][0], requires_grad=True)
    alone.grad = torch.zeros_like(alone)
    probe = type(optimizer)([{**group, "params": [alone]}])  # type: ignore[call-arg]  # all their options have defaults
    probe.step()
    return set(probe.state[alone])


def random_state(network: nn.Module | None = None) -> dict[str, Any]:
    """Return the generators' states as plain numbers and tensors, which ``weights_only=True`` can load.

    Parameters
    ----------
    network : nn.Module, optional
        Network whose passes may draw from seeds common to several processes; the state then includes these seeds.
    """
    seeds = _find_seeds(network)
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in list_gpus()],
        "passes": None if seeds is None else seeds.get_state(),
    }


def restore_random_state(state: Mapping[str, Any], network: nn.Module | None = None) -> None:
    """Set the generators to a saved state, except those of missing devices.

    Parameters
    ----------
    state : mapping
        Result of `random_state`.
    network : nn.Module, optional
        See `random_state`; all processes that run the network together call this function together.
    """
    seeds = _find_seeds(network)
    if seeds is not None:
        seeds.set_state(state.get("passes"))
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    for gpu, saved in zip(list_gpus(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved.cpu(), gpu)


def _find_seeds(network: nn.Module | None) -> CommonSeeds | None:
    return network.seeds if isinstance(network, ModelParallel) else None


# Save a training's state in the background: copy it to host memory between two steps, and write it in a thread.
#
# The host waits for the copies: at 25 GB/s half a GB takes 20 ms. They would not overlap with the next step on a
# separate stream: that step overwrites the state, and a second copy on the device would need memory that a
# training may not have.
#
# The thread makes no CUDA call, not even to free memory: such a call may invalidate a graph capture in progress. So the
# host memory is reused.


Buffers = dict[tuple[Any, ...], Tensor]
"""Host tensors by their positions in a state: keys and indices from the outside in."""


def copy_to_host(state: TrainingState, buffers: Buffers) -> TrainingState:
    """Return a copy of a state in host memory, pinned for copies from a GPU.

    ``buffers`` of the right size are overwritten; others are added.
    """
    gpus: set[torch.device] = set()
    parts = {part.name: getattr(state, part.name) for part in fields(state)}
    copied = replace(state, **_copied(parts, (), buffers, gpus))
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return copied


def _copied(value: Any, place: tuple[Any, ...], buffers: Buffers, gpus: set[torch.device]) -> Any:
    if isinstance(value, Tensor):
        buffer = buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            # Only as large as the tensor: torch.save writes the whole storage of a slice.
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
            buffers[place] = buffer
        if value.is_cuda:
            gpus.add(value.device)
        return buffer.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        result = copy.copy(value)  # a state_dict has the module versions as an attribute
        for key, inner in value.items():
            result[key] = _copied(inner, (*place, key), buffers, gpus)
        return result
    if isinstance(value, Mapping):
        return {key: _copied(inner, (*place, key), buffers, gpus) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner, (*place, number), buffers, gpus) for number, inner in enumerate(value))
    return value


class BackgroundWriter:
    """Copy states and write them in a thread, one at a time, while the training continues.

    Parameters
    ----------
    write : callable
        Function of a name and a state that runs in the thread. `poll` and `finish` raise its errors.
    """

    def __init__(self, write: Callable[[str, TrainingState], object]) -> None:
        self._write = write
        self._free: list[Buffers] = []
        self._waiting: dict[str, tuple[TrainingState, Buffers]] = {}  # while the thread writes another
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._is_given_up = False

    @property
    def is_idle(self) -> bool:
        """Whether every state is written."""
        return self._thread is None

    def take(self, name: str, state: TrainingState) -> None:
        """Copy a state and queue it for writing; it replaces a queued state of the same name."""
        buffers = self._free.pop() if self._free else {}
        taken = copy_to_host(state, buffers), buffers
        with self._lock:
            if self._thread is None:
                # A daemon, so that a second Ctrl-C need not wait for it. A training that ends normally joins it. The
                # state is an argument: a queued one could be replaced by one that `write` refuses.
                work = (name, *taken)
                self._thread = threading.Thread(target=self._work, args=work, name="checkpoint writer", daemon=True)
                self._thread.start()
                return
            replaced, self._waiting[name] = self._waiting.pop(name, None), taken
        if replaced is not None:
            self._free.append(replaced[1])

    def poll(self) -> None:
        """Raise a new error of the thread."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def finish(self) -> None:
        """Wait until every state is written; raise an error of the thread."""
        thread = self._thread
        if thread is not None and not self._is_given_up:
            self._is_given_up = True  # a second signal interrupts the wait; then `finish` must not wait again
            thread.join()
            self._is_given_up = False
        self.poll()

    def _work(self, name: str, state: TrainingState, buffers: Buffers) -> None:
        while True:
            try:
                self._write(name, state)
            except BaseException as fault:  # the training raises it
                self._fault = self._fault or fault
            self._free.append(buffers)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                name = next(iter(self._waiting))
                state, buffers = self._waiting.pop(name)
