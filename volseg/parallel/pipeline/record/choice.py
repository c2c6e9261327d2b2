"""Decide whether a batch may be replayed instead of running ``forward``.

A recording repeats kernels, not Python. It may replace ``forward`` only if Python would do the same again, so:

* all values that Python could read are part of the kind of batch: shapes, plain arguments, modes, autocast, and the
  network's condition (``Conditions``);
* random numbers that are drawn on the host, and values of tensors that Python reads, prevent a recording;
* hooks of the user must run, and a replay would not repeat side effects of ``forward`` (on buffers, attributes,
  arguments): such networks stay eager.

The first batches of each kind run eagerly, so that libraries choose kernels and persistent state is created. An attempt
to record runs ``forward`` once more than the user did. It has no side effects, whether it succeeds or not.
``device.record_policy`` decides how many recordings there are, and which are dropped.
"""

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from volseg.device.gpus import has_values, is_gpu, observer
from volseg.device.graph import describe_inputs, read_modes
from volseg.device.module_internals import get_backward_hooks
from volseg.device.record_policy import Kind, Recordings
from volseg.device.torch_internals import count_dispatch_modes
from volseg.parallel.pipeline.flow.placement import Placement
from volseg.parallel.pipeline.micro_batch import Call, CutBatch
from volseg.parallel.pipeline.record.batch import RecordedBatch
from volseg.parallel.pipeline.record.graphs import RecordRefusedError
from volseg.parallel.state.attempt import Attempt
from volseg.parallel.timeline import get_timeline

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager batches before one is recorded."""

TRACED_WARM_UP = 2
"""Eager batches before a recording if a step is only traced: the first creates persistent state, the second uses it."""

MOST_RECORDINGS = 3
"""Kinds of batches kept as recordings: training, validation and one spare."""

IDLE_BATCHES = 200
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
        Condition of the network (see ``Conditions``).
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


class BatchRecorder:
    """Record the kinds of batches that recur, after observing them.

    Each recording holds a batch's activations, so there are few: a new kind of batch replaces one that has been unused
    for long, otherwise it stays eager. Volumes of ever new sizes therefore run eagerly.

    Parameters
    ----------
    net
        The network.
    record
        False for no recordings, True for recordings wherever they are correct, ``"auto"`` for those on GPUs.
    devices
        Devices of the pipeline.
    """

    def __init__(self, net: nn.Module, record: str | bool, devices: Sequence[torch.device]) -> None:
        self._net, self._devices = net, list(devices)
        self._on_gpus = any(map(is_gpu, devices))
        self.is_active = record is True or (record == "auto" and self._on_gpus)
        """Whether batches are recorded at all."""
        self._modes = 0 if has_values() else count_dispatch_modes()
        warm_up = WARM_UP if has_values() else TRACED_WARM_UP
        self._recordings: Recordings[Kind[RecordedBatch]] = Recordings(
            Kind, warm_up=warm_up, limit=MOST_RECORDINGS, idle=IDLE_BATCHES
        )

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def lanes(self) -> list[int]:
        """Number of lanes of each recording."""
        return [kind.recording.lanes for kind in self._recordings.kept if kind.recording is not None]

    def find_kind(self, condition: Hashable | None, call: Call, target: torch.device) -> Kind[RecordedBatch] | None:
        """Return the kind of a batch, or ``None`` if nothing can be recorded; see ``identify_batch``."""
        key = identify_batch(condition, call, target, self._modes)
        return None if key is None else self._recordings.find_kind(key)

    def count(self, kind: Kind[RecordedBatch]) -> None:
        """Count an eager batch."""
        self._recordings.count(kind)

    def find(self, kind: Kind[RecordedBatch], placement: Placement, batch: CutBatch) -> RecordedBatch | None:
        """Return a usable recording for batches of this kind; make one if it is due."""
        if get_timeline() is not None and not self._on_gpus:
            return None  # a host's recording notes no times
        if kind.recording is None and not self._record(kind, placement, batch):
            return None
        found: RecordedBatch | None = kind.recording
        return self._recordings.use(kind) if found is not None and found.is_free else None

    def _record(self, kind: Kind[RecordedBatch], placement: Placement, batch: CutBatch) -> bool:
        """Record a kind of batches, if it is due; return whether a recording was made."""
        if not self._recordings.is_warm(kind) or not self._recordings.make_room():
            return False
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
        if placement.changes_arguments:
            raise RecordRefusedError("forward changes its arguments in place")
        observer().on_mark("record_pipeline")
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


def choose_lanes(stages: int, micro_batches: int) -> int:
    """Return two lanes if sharing a device gains more than filling and draining the pipeline by twos costs.

    Micro-batches in pairs, at s times the speed of single ones, take (m / 2 + p - 1) 2 / s steps of a stage; single
    ones take m + p - 1. With s = 1.2 of a V-Net on 64^3 voxels, pairs are faster from m = 4 (p - 1) on. Four lanes were
    9 % slower for large kernels, and 5 % faster for this V-Net.

    Examples
    --------
    >>> choose_lanes(stages=2, micro_batches=16), choose_lanes(stages=4, micro_batches=8)
    (2, 1)
    """
    return 2 if micro_batches >= max(2, 4 * (stages - 1)) else 1
