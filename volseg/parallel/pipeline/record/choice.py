"""Decide whether a batch may be replayed, and find out whether ``forward`` always does the same.

A recording repeats kernels, not Python. It may stand for ``forward`` only where Python would do the same again, so:

* the first batches of each kind run eagerly, and a *signature* of every micro-batch (each function, what it reads,
  its plain arguments) must come out the same each time: a layer dropped at random, a drawn factor or a counter shows;
* whatever Python could read is part of the key: shapes, plain arguments, modes, autocast, and what ``Fingerprint``
  finds in the network;
* hooks of the user's are Python that must run, and what ``forward`` leaves behind (buffers, attributes, changed
  arguments) would not be left by a replay: such networks stay eager.

An attempt to record runs ``forward`` more often than the user did; whether it succeeds or is refused, nothing shows.

Some steps are then timed in each way that there is (eagerly, recorded, recorded with two micro-batches beside one
another), and the quickest is kept.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from volseg.parallel.pipeline.flow.placement import PlacedRun, Placement
from volseg.parallel.pipeline.micro_batch import Call
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.record.passage import CaptureRefusedError
from volseg.parallel.pipeline.record.record import capture
from volseg.parallel.pipeline.record.rehearsal import rehearse
from volseg.parallel.pipeline.record.replay import Replay
from volseg.parallel.pipeline.record.trial import EAGER, Trial, clock
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers

__all__ = ["WARM_UP", "Recordings", "Watch", "WatchedRun", "situation"]

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager batches before one is recorded."""

MOST_RECORDINGS = 3
"""Kinds of batches kept as recordings: training, validation and one to spare."""

RECORDED = (1, 2, 4)
"""Numbers of lanes that are tried."""

LONG = 200
"""Batches after which an unused recording gives way."""

MOST_KINDS = 64
"""Kinds of batches watched at a time."""

SHOWN = 3
"""Changes named in a message."""

PLAIN = (bool, int, float, str, type(None))


def situation(condition: Hashable | None, call: Call, target: torch.device) -> Hashable | None:
    """Return what a recording depends on, or ``None`` where nothing can be recorded.

    Parameters
    ----------
    condition
        Of the network (``Fingerprint``).
    call
        The batch.
    target
        Where its outputs go.
    """
    if condition is None or torch._C._len_torch_dispatch_stack():
        return None
    leaves, structure = pytree.tree_flatten(call)
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, PLAIN):
            described.append((type(leaf), leaf))
        else:
            return None
    cast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, target)
    precision = (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    repeats = torch.are_deterministic_algorithms_enabled()
    return str(structure), tuple(described), modes, precision, repeats, condition


class Watch:
    """Signatures of the eager batches of one kind."""

    is_refused = False
    """Whether recording has been tried in vain."""

    def __init__(self) -> None:
        self.batches = 0
        self.changed: set[str] = set()
        """Functions that changed parameters or buffers."""
        self._signatures: dict[int, set[int]] = {}

    def note(self, samples: int, signature: int, changed: Iterable[str] = ()) -> None:
        """Add that of one micro-batch, and the functions that changed parameters or buffers in it."""
        self._signatures.setdefault(samples, set()).add(signature)
        self.changed.update(changed)

    @property
    def is_steady(self) -> bool:
        """Whether micro-batches of one size have always done the same."""
        return all(len(found) == 1 for found in self._signatures.values())


class Recordings:
    """Recordings of the kinds of batches that come often, made after they have been watched.

    Each holds a batch's activations, so there are few: a new kind takes the place of one that has not come for
    long, else it stays eager. Volumes of ever new sizes are therefore launched eagerly.

    Parameters
    ----------
    net
        The network.
    launch
        ``"eager"`` for none, ``"graphs"`` for recordings wherever they are right, ``"auto"`` for those that are
        quicker as well.
    devices
        Of the pipeline.
    """

    def __init__(self, net: nn.Module, launch: str, devices: Sequence[torch.device]) -> None:
        self._net, self._devices = net, list(devices)
        has_gpu = any(device.type == "cuda" for device in devices)
        self.are_made = launch == "graphs" or (launch == "auto" and has_gpu)
        """Whether batches are recorded at all."""
        recorded = RECORDED if has_gpu else RECORDED[:1]
        self._ways = (EAGER, *recorded) if launch == "auto" else recorded
        self._watches: dict[Hashable, Watch] = {}
        self._trials: dict[Hashable, Trial] = {}
        self._made: dict[Hashable, Replay] = {}
        self._last_used: dict[Hashable, int] = {}
        self._batches = 0

    def __len__(self) -> int:
        return len(self._made)

    @property
    def lanes(self) -> list[int]:
        """Of each recording."""
        return [made.lanes for made in self._made.values()]

    def watch(self, key: Hashable) -> Watch | None:
        """Return what to note an eager batch of this kind in, or ``None`` where it has been seen often enough."""
        if key not in self._watches and len(self._watches) >= MOST_KINDS:
            # Something that forward could read changes all the time.
            self._watches.clear()
        watch = self._watches.setdefault(key, Watch())
        watch.batches += 1
        return watch if watch.batches <= WARM_UP else None

    def find(
        self,
        key: Hashable,
        placement: Placement,
        call: Call,
        calls: Sequence[Call],
        sizes: Sequence[int],
        target: torch.device,
        is_batch: Sequence[bool],
    ) -> Replay | None:
        """Return a recording for batches of this kind that can be used now, made if it is time to.

        ``call`` is the batch, ``calls`` its micro-batches; ``is_batch`` says which of its leaves were cut.
        """
        self._batches += 1
        if not self._is_time(key):
            return None
        if key not in self._trials:
            ways = _worth_trying(self._ways, len(placement.locations), len(calls))
            self._trials[key] = Trial(clock(self._devices), ways)
        trial = self._trials[key]
        if key in self._made and not self._made[key].is_free:
            # Launched eagerly though there is a recording: not what is to be timed.
            trial.end()
            return None
        self._last_used[key] = self._batches
        is_undecided = not trial.is_over
        trial.end()
        if is_undecided and trial.is_over:
            logger.info("a step takes %s", trial)
        if key in self._made and self._made[key].lanes == trial.way:
            trial.begin(trial.way)
            return self._made[key]
        return self._renew(key, placement, call, calls, sizes, target, is_batch)

    def _renew(
        self,
        key: Hashable,
        placement: Placement,
        call: Call,
        calls: Sequence[Call],
        sizes: Sequence[int],
        target: torch.device,
        is_batch: Sequence[bool],
    ) -> Replay | None:
        """Make the recording that is to be tried next; ``None`` where that is an eager step."""
        trial = self._trials[key]
        if self._made.pop(key, None) is not None:
            # Two would not fit beside one another.
            _free_memory()
        while trial.way != EAGER:
            try:
                self._made[key] = self._make(placement, call, calls, sizes, target, is_batch, trial.way)
            except Exception as failure:  # a failed capture costs speed, not the run
                level = logging.WARNING if trial.way == 1 else logging.INFO
                logger.log(level, "recording micro-batches in %d lanes failed: %s", trial.way, failure)
                trial.exclude(trial.way)
                continue
            return self._made[key]
        if trial.is_over:
            logger.info("micro-batches are launched one by one")
            self._watches[key].is_refused = True
        trial.begin(EAGER)
        return None

    def _make(
        self,
        placement: Placement,
        call: Call,
        calls: Sequence[Call],
        sizes: Sequence[int],
        target: torch.device,
        is_batch: Sequence[bool],
        lanes: int,
    ) -> Replay:
        """Record, and compare with an eager passage; nothing of it remains but the recording."""
        hooked = [name for name, parameter in self._net.named_parameters() if parameter._backward_hooks]
        if hooked:
            raise CaptureRefusedError(f"the hook of {hooked[0]} would be called for gradients that do not count")
        known = remember(self._net, placement.written)
        try:
            # What is recorded on GPUs draws from their generators, which a capture leaves alone.
            with own_random_numbers([]):
                rehearsal = rehearse(self._net, placement, calls, sizes)
                if changed := known.changes():
                    raise CaptureRefusedError(f"forward changes {', '.join(changed[:SHOWN])}, which a replay would not")
                # Recordings have memory of their own; what eager batches left behind is wanted there.
                _free_memory()
                if rehearsal is None and lanes > 1:
                    raise CaptureRefusedError("graphs that run beside one another would draw the same random numbers")
                leaves = pytree.tree_leaves(call)
                is_cut = [is_cut for leaf, is_cut in zip(leaves, is_batch, strict=True) if isinstance(leaf, Tensor)]
                replay = Replay(capture(self._net, placement, calls, lanes), sizes, target, is_cut)
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                found = None if rehearsal is None else rehearsal.disagreement(replay, tensors)
                if found is not None:
                    raise CaptureRefusedError(found)
                return replay
        finally:
            known.put_back()

    def _is_time(self, key: Hashable) -> bool:
        """Whether batches of this kind have been watched, and may be recorded."""
        watch = self._watches.get(key)
        if key in self._made:
            return True
        if watch is None or watch.batches < WARM_UP or watch.is_refused:
            return False
        if watch.changed:
            names = ", ".join(sorted(watch.changed))
            logger.warning("micro-batches are launched one by one, since forward changes its own state (%s)", names)
            watch.is_refused = True
            return False
        if not watch.is_steady:
            logger.warning("micro-batches are launched one by one, since forward does not do the same for each")
            watch.is_refused = True
            return False
        if len(self._made) >= MOST_RECORDINGS:
            oldest = min(self._made, key=self._last_used.__getitem__)
            if self._batches - self._last_used[oldest] < LONG:
                return False
            del self._made[oldest]
        return True


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


def _worth_trying(ways: Sequence[int], stages: int, micro_batches: int) -> list[int]:
    """Leave out lanes whose filling and draining must cost more than sharing a device gains.

    Micro-batches that go by groups of n, at s times the speed of one, take (m / n + p - 1) n / s steps of a stage where
    single ones take m + p - 1. With the s of a small V-Net on an H200, 1.4 (two) and 1.6 (four), groups are quicker
    from m = 1.5 (p - 1) and m = 4 (p - 1) on: the rule asks for a little more, and the trial decides.

    Examples
    --------
    >>> _worth_trying((0, 1, 2, 4), stages=2, micro_batches=16), _worth_trying((1, 2, 4), stages=4, micro_batches=8)
    ([0, 1, 2, 4], [1, 2])
    """
    return [way for way in ways if way <= 1 or way**2 * max(1, stages - 1) <= 2 * micro_batches]


def _free_memory() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class WatchedRun(PlacedRun):
    """A placed run that sums up what it did in ``signature``."""

    skips_quiet = False
    signature = 0
    _number = 0

    def __enter__(self) -> "WatchedRun":
        super().__enter__()
        self.changed: set[str] = set()
        # By memory, not identity: ``.data`` is another tensor, with versions of its own.
        self._memory = {state.untyped_storage().data_ptr() for state in self.placement.states}
        return self

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [runs.unwrapped(tensor) for tensor in runs.tensors_of((args, kwargs or {}))]
        read = [(tensor, runs.version(tensor)) for tensor in plain]
        result = super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", "")
        for tensor in runs.changes_in_place(read):
            if id(tensor) not in self.placement.counters and _address(tensor) in self._memory:
                self.changed.add(name)
        if not runs.keeps_place(function):
            self.signature = hash(
                (self.signature, name, *map(self._describe, pytree.tree_leaves((args, kwargs or {}))))
            )
            self._number += 1
            for tensor in runs.tensors_of(result):
                tensor._volseg_order = self._number  # type: ignore[attr-defined]
        return result

    def _describe(self, leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return id(leaf) if id(leaf) in self.placement.owners else getattr(leaf, "_volseg_order", None)
        return leaf if isinstance(leaf, PLAIN) else str(type(leaf))
