"""Decide whether a batch may be replayed instead of running ``forward``.

A recording repeats kernels, not Python. It may replace ``forward`` only if Python would do the same again, so:

* all values that Python could read are part of the kind of batch: shapes, plain arguments, modes, autocast, and the
  network's condition (``Conditions``);
* random numbers that are drawn on the host, and values of tensors that Python reads, prevent a recording;
* hooks of the user must run, and a replay would not repeat side effects of ``forward`` (on buffers, attributes,
  arguments): such networks stay eager.

The first batches of each kind run eagerly, so that libraries choose kernels and persistent state is created. An attempt
to record runs ``forward`` once more than the user did. It has no side effects, whether it succeeds or not.
``record_policy`` decides how many recordings there are, and which are dropped.
"""

import logging
from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from volseg.device.gpus import has_values, is_gpu, observer
from volseg.device.graph import describe_inputs, read_modes
from volseg.device.module_internals import HOOKS_OF_ALL_MODULES, get_backward_hooks
from volseg.device.torch_internals import count_dispatch_modes
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.graphs import RecordRefusedError
from volseg.parallel.pipeline.micro_batch import Call, CutBatch
from volseg.parallel.pipeline.placement import Placement
from volseg.parallel.pipeline.recorded_batch import RecordedBatch
from volseg.parallel.record_policy import Kind, Recordings
from volseg.parallel.state.description import find_tensor
from volseg.parallel.state.recorded import Attempt
from volseg.parallel.state.watch import Watch

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager batches before one is recorded."""

TRACED_WARM_UP = 2
"""Eager batches before a recording if a step is only traced: the first creates persistent state, the second uses it."""

MOST_RECORDINGS = 3
"""Kinds of batches kept as recordings: training, validation and one spare."""

IDLE_BATCHES = 200
"""Batches after which an unused recording may be replaced."""

MOST_NUMBERS = 64
"""Conditions of a network that are remembered."""

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


class Conditions:
    """Number the conditions of a network, and recognise earlier ones, such as training and validation.

    Attributes
    ----------
    form : int
        Number of the condition at the last call, where only the dimensions of tensors count: the features that a
        network keeps of its last batch do not change whether outputs have one row per sample.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._watch: Watch | None = None
        self._numbers: dict[Hashable, int] = {}
        self._given = self._number = self.form = 0
        self._needs_python = False

    def __call__(self) -> int | None:
        """Return the number of the network's condition; ``None`` if Python has to run each time."""
        if self._watch is None or self._watch.changes():
            self._watch = self._watch or Watch(self._net)
            items = self._watch.described.items()
            self._number = self._find_number(frozenset(items))
            self.form = self._find_number(
                frozenset((key, tuple(map(_without_identity, described))) for key, described in items)
            )
            self._needs_python = bool(self._watch.unknown) or any(HOOKS_OF_ALL_MODULES) or runs.is_hooked(self._net)
        return None if self._needs_python else self._number

    def _find_number(self, description: Hashable) -> int:
        """Give this condition its earlier number, or a new one."""
        if description not in self._numbers:
            if len(self._numbers) >= MOST_NUMBERS:
                self._numbers.clear()  # the conditions change all the time; old numbers are not used again
            self._given += 1
            self._numbers[description] = self._given
        return self._numbers[description]


def _without_identity(token: Hashable) -> Hashable:
    tensor = find_tensor(token)
    return token if tensor is None else (Tensor, tensor.num_dims)


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

    Attributes
    ----------
    conditions
        Conditions of the network.
    is_active
        Whether batches are recorded at all.
    """

    def __init__(self, net: nn.Module, record: str | bool, devices: Sequence[torch.device]) -> None:
        self._net = net
        self._on_gpus = any(map(is_gpu, devices))
        self.is_active = record is True or (record == "auto" and self._on_gpus)
        self.conditions = Conditions(net)
        self._modes = 0 if has_values() else count_dispatch_modes()
        warm_up = WARM_UP if has_values() else TRACED_WARM_UP
        self._recordings = Recordings(warm_up=warm_up, limit=MOST_RECORDINGS, idle=IDLE_BATCHES)

    @property
    def num_kept(self) -> int:
        """Number of kinds of batches that have recordings."""
        return len(self._recordings.kept)

    def find(self, placement: Placement, batch: CutBatch) -> RecordedBatch | None:
        """Return a usable recording for batches of this kind, made if it is due; otherwise count an eager batch."""
        if not self.is_active:
            return None
        key = identify_batch(self.conditions(), batch.call, batch.target, self._modes)
        if key is None:
            return None
        found: RecordedBatch | None = self._recordings.find(key, partial(self._record, placement, batch))
        return found

    def _record(self, placement: Placement, batch: CutBatch, kind: Kind) -> None:
        try:
            self._recordings.keep(kind, self._attempt(placement, batch))
        except Exception as failure:  # a recording that fails costs speed, not the run
            logger.warning("micro-batches run kernel by kernel, since recording them failed: %s", failure)
            self._recordings.refuse(str(failure), kind)

    def _attempt(self, placement: Placement, batch: CutBatch) -> RecordedBatch:
        """Record without side effects."""
        # The estimate counts on it too: replicas sum the gradients of a pipeline by such hooks.
        if hooked := next((name for name, p in self._net.named_parameters() if get_backward_hooks(p)), None):
            raise RecordRefusedError(f"{hooked} has a hook for its gradient")
        observer().on_mark("record_pipeline")
        # Recorded GPU work draws from the GPUs' generators, which a recording does not advance.
        with Attempt(self._net, written=placement.written) as attempt:
            watch = Watch(self._net)
            lanes = choose_lanes(len(placement.locations), len(batch.calls))
            recorded = RecordedBatch(self._net, placement, batch, lanes)
            if changed := [*(change.name for change in watch.changes()), *attempt.network.list_written()]:
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
