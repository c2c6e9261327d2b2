"""Decide whether a batch may be replayed: detect whether ``forward`` always does the same.

A recording repeats kernels, not Python. It may replace ``forward`` only if Python would do the same again, so:

* the first batches of each kind run eagerly, and a *summary* of every micro-batch (each function, the tensors it
  reads, its plain arguments) must be equal each time: this detects a layer dropped at random, a drawn factor or a
  counter;
* all values that Python could read are part of the kind: shapes, plain arguments, modes, autocast, and the network's
  condition (``state.conditions``);
* hooks of the user are Python that must run, and a replay would not repeat side effects of ``forward`` (on buffers,
  attributes, arguments): such networks stay eager.

An attempt to record runs ``forward`` more often than the user did; it has no side effects, whether it succeeds or not.

Some steps are then timed in each available way (eagerly, recorded, recorded with two concurrent micro-batches), and the
fastest is kept. ``device.record_policy`` decides how many recordings there are, and which are dropped.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import has_values, is_gpu, observer, release_cache
from volseg.device.graph import describe_inputs, describe_plain, read_modes
from volseg.device.module_internals import get_backward_hooks
from volseg.device.record_policy import Kind, Recordings
from volseg.device.torch_internals import count_dispatch_modes, get_storage_key, pytree
from volseg.parallel.pipeline.flow.placement import PlacedRun, Placement
from volseg.parallel.pipeline.micro_batch import Call, CutBatch
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.record.passage import RecordRefusedError
from volseg.parallel.pipeline.record.record import record_batch
from volseg.parallel.pipeline.record.rehearsal import rehearse
from volseg.parallel.pipeline.record.replay import Replay
from volseg.parallel.pipeline.record.trial import EAGER, Trial, make_clock
from volseg.parallel.state.attempt import Attempt

__all__ = ["WARM_UP", "BatchKind", "BatchRecorder", "Behaviour", "ObservedRun", "identify_batch"]

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager batches before one is recorded."""

FOLLOWED = 2
"""Of these, batches that are only traced: the first creates persistent state, the second finds it."""

MOST_RECORDINGS = 3
"""Kinds of batches kept as recordings: training, validation and one spare."""

RECORDED = (1, 2, 4)
"""Numbers of lanes that are tried."""

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
class BatchKind(Kind[Replay]):
    """Batches that do the same."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    trial: Trial | None = None
    draws: bool = False
    """Whether forward draws random numbers, which allows only one lane."""


class BatchRecorder:
    """Record the kinds of batches that recur, after observing them.

    Each recording holds a batch's activations, so there are few: a new kind replaces one that has been unused for long,
    otherwise it stays eager. Volumes of ever new sizes therefore run eagerly.

    Parameters
    ----------
    net
        The network.
    record
        False for no recordings, True for recordings wherever they are correct, ``"auto"`` for those that are also
        faster.
    devices
        Of the pipeline.
    """

    def __init__(self, net: nn.Module, record: str | bool, devices: Sequence[torch.device]) -> None:
        self._net, self._devices = net, list(devices)
        has_gpu = any(map(is_gpu, devices))
        self.is_active = record is True or (record == "auto" and has_gpu)
        """Whether batches are recorded at all."""
        recorded = RECORDED if has_gpu else RECORDED[:1]
        times_eager = record == "auto" and has_values()
        self._ways = (EAGER, *recorded) if times_eager else recorded
        # Without a GPU there is nothing to time: the way with most lanes, which holds most memory, comes first and
        # stays.
        self._follows = not has_values()
        self._modes = count_dispatch_modes() if self._follows else 0
        warm_up = FOLLOWED if self._follows else WARM_UP
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

    def find(self, kind: BatchKind, placement: Placement, batch: CutBatch) -> Replay | None:
        """Return a usable recording for batches of this kind; make one if it is due."""
        if kind.recording is None and not self._is_time(kind):
            return None
        if kind.trial is None:
            ways = _choose_ways(self._ways, len(placement.locations), len(batch.calls))
            kind.trial = Trial(make_clock(self._devices), ways[::-1] if self._follows else ways)
        trial = kind.trial
        if kind.recording is not None and not kind.recording.is_free:
            # An eager run although a recording exists: not to be timed.
            trial.end()
            return None
        is_undecided = not trial.is_over
        trial.end()
        if is_undecided and trial.is_over:
            logger.info("a step takes %s", trial)
        if kind.recording is not None and kind.recording.lanes == trial.way:
            trial.begin(trial.way)
        elif not self._record_next(kind, trial, placement, batch):
            return None
        replay: Replay = self._recordings.use(kind)
        return replay

    def _record_next(self, kind: BatchKind, trial: Trial, placement: Placement, batch: CutBatch) -> bool:
        """Make the recording that is to be tried next; return False if the next trial is an eager step."""
        if kind.recording is not None:
            self._recordings.drop(kind)
            # Two would not fit at the same time.
            _free_memory(self._devices)
        while trial.way != EAGER:
            try:
                self._recordings.keep(kind, self._record(kind, placement, batch, trial.way))
            except Exception as failure:  # a recording that fails costs speed, not the run
                level = logging.WARNING if trial.way == 1 else logging.INFO
                logger.log(level, "recording micro-batches in %d lanes failed: %s", trial.way, failure)
                trial.exclude(trial.way)
                continue
            return True
        if trial.is_over:
            logger.info("micro-batches run kernel by kernel")
            self._recordings.refuse("no recording is possible, or quicker", kind)
        trial.begin(EAGER)
        return False

    def _record(self, kind: BatchKind, placement: Placement, batch: CutBatch, lanes: int) -> Replay:
        """Record, and compare with an eager run, without side effects."""
        _check_draws(kind, lanes)
        hooked = [name for name, parameter in self._net.named_parameters() if get_backward_hooks(parameter)]
        if hooked:
            raise RecordRefusedError(f"the hook of {hooked[0]} would be called for gradients of the attempt")
        observer().on_mark("lanes")
        # Recorded GPU work draws from the GPUs' generators, which a recording does not advance.
        with Attempt(self._net, written=placement.written) as attempt:
            rehearsal = rehearse(self._net, placement, batch.calls, batch.sizes)
            if changed := attempt.network.changes():
                raise RecordRefusedError(f"forward changes {', '.join(changed[:SHOWN])}, which a replay would not")
            # Recordings have their own memory; they need the memory that eager batches have cached.
            _free_memory(self._devices)
            kind.draws = rehearsal is None
            _check_draws(kind, lanes)
            leaves = pytree.tree_leaves(batch.call)
            pairs = zip(leaves, batch.is_batch, strict=True)
            is_cut = [is_cut for leaf, is_cut in pairs if isinstance(leaf, Tensor)]
            replay = Replay(record_batch(self._net, placement, batch.calls, lanes), batch.sizes, batch.target, is_cut)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            found = None if rehearsal is None else rehearsal.find_disagreement(replay, tensors)
            if found is not None:
                raise RecordRefusedError(found)
            return replay

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


def _check_draws(kind: BatchKind, lanes: int) -> None:
    if kind.draws and lanes > 1:
        raise RecordRefusedError("concurrent graphs would draw the same random numbers")


def _choose_ways(ways: Sequence[int], stages: int, micro_batches: int) -> list[int]:
    """Leave out lanes whose filling and draining must cost more than sharing a device gains.

    Micro-batches that go by groups of n, at s times the speed of one, take (m / n + p - 1) n / s steps of a stage where
    single ones take m + p - 1. With the s of a small V-Net on an H200, 1.4 (two) and 1.6 (four), groups are quicker
    from m = 1.5 (p - 1) and m = 4 (p - 1) on: the rule asks for a little more, and the trial decides.

    Examples
    --------
    >>> _choose_ways((0, 1, 2, 4), stages=2, micro_batches=16), _choose_ways((1, 2, 4), stages=4, micro_batches=8)
    ([0, 1, 2, 4], [1, 2])
    """
    return [way for way in ways if way <= 1 or way**2 * max(1, stages - 1) <= 2 * micro_batches]


def _free_memory(devices: Sequence[torch.device]) -> None:
    if any(map(is_gpu, devices)):
        gc.collect()
        release_cache(devices)


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
