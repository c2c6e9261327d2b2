"""Decide whether a batch may be replayed: detect whether ``forward`` always does the same.

A recording repeats kernels, not Python. It may replace ``forward`` only if Python would do the same again, so:

* the first batches of each kind run eagerly, and a *summary* of every micro-batch (each function, the tensors it
  reads, its plain arguments) must be equal each time: this detects a layer dropped at random, a drawn factor or a
  counter;
* all values that Python could read are part of the kind: shapes, plain arguments, modes, autocast, and the network's
  condition (``state.conditions``);
* hooks of the user are Python that must run, and a replay would not repeat side effects of ``forward`` (on buffers,
  attributes, arguments): such networks stay eager.

An attempt to record runs ``forward`` once more than the user did; it has no side effects, whether it succeeds or not.
``device.record_policy`` decides how many recordings there are, and which are dropped.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import has_values, is_gpu, observer
from volseg.device.graph import describe_inputs, describe_plain, read_modes
from volseg.device.module_internals import get_backward_hooks
from volseg.device.record_policy import Kind, Recordings
from volseg.device.torch_internals import count_dispatch_modes, get_storage_key, pytree
from volseg.parallel.pipeline.flow.placement import PlacedRun, Placement
from volseg.parallel.pipeline.micro_batch import Call, CutBatch
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.record.batch import RecordedBatch
from volseg.parallel.pipeline.record.graphs import RecordRefusedError
from volseg.parallel.state.attempt import Attempt
from volseg.parallel.timeline import find_timeline

__all__ = ["WARM_UP", "BatchKind", "BatchRecorder", "Behaviour", "ObservedRun", "identify_batch"]

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager batches before one is recorded."""

FOLLOWED = 2
"""Of these, batches that are only traced: the first creates persistent state, the second finds it."""

MOST_RECORDINGS = 3
"""Kinds of batches kept as recordings: training, validation and one spare."""

LONG = 200
"""Batches after which an unused recording may be replaced."""

SHOWN = 3
"""Changes named in a message."""


def identify_batch(
    condition: Hashable | None, call: Call, target: torch.device, usual_modes: int = 0
) -> Hashable | None:
    """Return a key of everything on which a recording depends, or ``None`` if nothing can be recorded.

    Parameters
    ----------
    condition
        Of the network (``Conditions``).
    call
        The batch.
    target
        Device of its outputs.
    usual_modes
        Active dispatch modes of torch that observe a step and do not change it.
    """
    if condition is None or count_dispatch_modes() > usual_modes:
        return None
    found = describe_inputs(call, with_strides=True)
    return None if found is None else (*found, *read_modes(), target, condition)


class Behaviour:
    """Behaviour of the eager batches of one kind."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        """Functions that changed parameters or buffers."""
        self._summaries: dict[int, set[int]] = {}

    def note(self, samples: int, summary: int, changed: Iterable[str] = ()) -> None:
        """Add the summary of one micro-batch, and the functions that changed parameters or buffers in it."""
        self._summaries.setdefault(samples, set()).add(summary)
        self.changed.update(changed)

    @property
    def is_steady(self) -> bool:
        """Whether micro-batches of one size have always done the same."""
        return all(len(found) == 1 for found in self._summaries.values())

    @property
    def objection(self) -> str | None:
        """Reason why a replay would not do the same, or None."""
        if self.changed:
            return f"forward changes its own state ({', '.join(sorted(self.changed))})"
        return None if self.is_steady else "forward does not do the same for each"


@dataclass(eq=False)
class BatchKind(Kind[RecordedBatch]):
    """Batches that do the same."""

    behaviour: Behaviour = field(default_factory=Behaviour)


class BatchRecorder:
    """Record the kinds of batches that recur, after observing them.

    Each recording holds a batch's activations, so there are few: a new kind replaces one that has been unused for long,
    otherwise it stays eager. Volumes of ever new sizes therefore run eagerly.

    Parameters
    ----------
    net
        The network.
    record
        False for no recordings, True for recordings wherever they are correct, ``"auto"`` for those on GPUs.
    devices
        Of the pipeline.
    """

    def __init__(self, net: nn.Module, record: str | bool, devices: Sequence[torch.device]) -> None:
        self._net, self._devices = net, list(devices)
        self._on_gpus = any(map(is_gpu, devices))
        self.is_active = record is True or (record == "auto" and self._on_gpus)
        """Whether batches are recorded at all."""
        self._modes = 0 if has_values() else count_dispatch_modes()
        warm_up = WARM_UP if has_values() else FOLLOWED
        self._recordings = Recordings(BatchKind, warm_up=warm_up, limit=MOST_RECORDINGS, idle=LONG)

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def lanes(self) -> list[int]:
        """Number of lanes of each recording."""
        return [kind.recording.lanes for kind in self._recordings.kept if kind.recording is not None]

    def find_kind(self, condition: Hashable | None, call: Call, target: torch.device) -> BatchKind | None:
        """Return the kind of a batch, or ``None`` if nothing can be recorded; see ``identify_batch``."""
        key = identify_batch(condition, call, target, self._modes) if self.is_active else None
        return None if key is None else self._recordings.find_kind(key)

    def observe(self, kind: BatchKind) -> Behaviour | None:
        """Return where to record the behaviour of an eager batch, or ``None`` after enough batches."""
        self._recordings.count(kind)
        return kind.behaviour if kind.calls <= WARM_UP else None

    def find(self, kind: BatchKind, placement: Placement, batch: CutBatch) -> RecordedBatch | None:
        """Return a usable recording for batches of this kind; make one if it is due."""
        if find_timeline() is not None and not self._on_gpus:
            return None  # a host's recording notes no times
        if kind.recording is None and not (self._is_time(kind) and self._record(kind, placement, batch)):
            return None
        found: RecordedBatch | None = kind.recording
        return self._recordings.use(kind) if found is not None and found.is_free else None

    def _record(self, kind: BatchKind, placement: Placement, batch: CutBatch) -> bool:
        """Record a kind of batches; return whether that was possible."""
        try:
            self._recordings.keep(kind, self._attempt(placement, batch))
        except Exception as failure:  # a recording that fails costs speed, not the run
            logger.warning("micro-batches run kernel by kernel, since recording them failed: %s", failure)
            self._recordings.refuse(str(failure), kind)
            return False
        return True

    def _attempt(self, placement: Placement, batch: CutBatch) -> RecordedBatch:
        """Record without side effects."""
        hooked = [name for name, parameter in self._net.named_parameters() if get_backward_hooks(parameter)]
        if hooked:
            raise RecordRefusedError(f"the hook of {hooked[0]} would be called for gradients of the attempt")
        observer().on_mark("lanes")
        # Recorded GPU work draws from the GPUs' generators, which a recording does not advance.
        with Attempt(self._net, written=placement.written) as attempt:
            recorded = RecordedBatch(
                self._net, placement, batch, choose_lanes(len(placement.locations), len(batch.calls))
            )
            if changed := attempt.network.changes():
                raise RecordRefusedError(f"forward changes {', '.join(changed[:SHOWN])}, which a replay would not")
            if attempt.random.foreign_moved():
                raise RecordRefusedError("forward draws random numbers of Python or NumPy, which a replay would not")
            if self._on_gpus and attempt.random.torch_moved():
                raise RecordRefusedError("forward draws random numbers on the host, which a replay would not")
        return recorded

    def _is_time(self, kind: BatchKind) -> bool:
        """Return whether batches of this kind have been observed, and may be recorded."""
        if not self._recordings.is_warm(kind):
            return False
        if (objection := kind.behaviour.objection) is not None:
            logger.warning("micro-batches run kernel by kernel, since %s", objection)
            self._recordings.refuse(objection, kind)
            return False
        return self._recordings.make_room()


def _read_address(tensor: Tensor) -> int:
    return get_storage_key(tensor.untyped_storage()) if tensor.layout == torch.strided else -1


def choose_lanes(stages: int, micro_batches: int) -> int:
    """Return as many lanes as gain more by sharing a device than they cost by filling and draining the pipeline.

    Micro-batches that go by groups of n, at s times the speed of one, take (m / n + p - 1) n / s steps of a stage where
    single ones take m + p - 1. With s = 1.2 (two) and 1.3 (four) of a V-Net on 64^3 voxels, groups are faster from
    about m = n^2 (p - 1) on.

    Examples
    --------
    >>> choose_lanes(stages=2, micro_batches=16), choose_lanes(stages=2, micro_batches=8), choose_lanes(4, 8)
    (4, 2, 1)
    """
    return max(lanes for lanes in (1, 2, 4) if lanes == 1 or lanes**2 * max(1, stages - 1) <= micro_batches)


class ObservedRun(PlacedRun):
    """A placed run that collects a ``summary`` of its functions."""

    skips_quiet = False
    summary = 0
    _number = 0

    def __enter__(self) -> "ObservedRun":
        super().__enter__()
        self.changed: set[str] = set()
        # By memory, not identity: ``.data`` is another tensor, with its own version.
        self._memory = {get_storage_key(state.untyped_storage()) for state in self.placement.states}
        return self

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [runs.unwrap(tensor) for tensor in runs.find_tensors((args, kwargs or {}))]
        read = [(tensor, runs.read_version(tensor)) for tensor in plain]
        result = super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", "")
        for tensor in runs.find_changes(read):
            if id(tensor) not in self.placement.counters and _read_address(tensor) in self._memory:
                self.changed.add(name)
        if not runs.keeps_place(function):
            self.summary = hash((self.summary, name, *map(self._describe, pytree.tree_leaves((args, kwargs or {})))))
            self._number += 1
            for tensor in runs.find_tensors(result):
                tensor._volseg_order = self._number  # type: ignore[attr-defined]
        return result

    def _describe(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return id(leaf) if id(leaf) in self.placement.owners else getattr(leaf, "_volseg_order", None)
        return describe_plain(leaf) or str(type(leaf))
