"""Run a network in each mode of ``verify``, and compare each mode with the plain network."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.torch_internals import tree_map
from volseg.errors import ParallelError, VolsegError
from volseg.parallel.devices import list_gpus
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.pipeline.costs import observe_copy
from volseg.parallel.pipeline.trace import list_segments
from volseg.parallel.recorded_step import RecordedStep
from volseg.parallel.spatial import SpatialStrategy
from volseg.parallel.state.random import seeded
from volseg.parallel.verification.comparison import Values, compare_values, eager_step, find_kind, observe, whole
from volseg.parallel.verification.report import ModeResult, Report
from volseg.parallel.verification.subject import Subject, cut_pieces, name_few

STEPS = 2
"""Number of steps: the second one uses parameters, buffers and caches that the first one has changed."""

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of the names of running statistics, which a pipeline updates from the whole batch."""

RECORDED_AFTER = 3
"""Number of eager steps before a recording, for both strategies."""


@dataclass(frozen=True)
class Mode:
    """One way to run the network."""

    training: bool
    remark: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of ``ModelParallel`` besides those of all modes."""
    gradients: bool = True
    recorded: bool = False
    split_size: int | None = None
    """Samples per micro-batch; the plain network then runs in such micro-batches too."""
    devices: tuple[torch.device, ...] | None = None
    """Devices of this mode, instead of those of the comparison."""

    @property
    def name(self) -> str:
        """Name in the report."""
        return ", ".join(filter(None, ("train" if self.training else "eval", self.remark)))


class _NothingToCompareError(Exception):
    """A mode equals another one for this network; the message gives the reason."""


def make_copies(count: int) -> list[torch.device]:
    """Return distinct CPU devices, between which tensors are really copied: one device would hide stale copies."""
    return [torch.device("cpu"), *(torch.device("cpu", index) for index in range(1, count))]


class Comparison:
    """The modes of one strategy, each compared with the plain network.

    Parameters
    ----------
    net
        The network.
    shape, more
        The shape of its volume, and its further arguments.
    devices
        Devices of the comparison; None for those of a process group.
    objective
        Maps outputs to a loss.
    tolerance
        Largest relative error that counts as equal.
    strategy, options
        Arguments of ``ModelParallel``.
    """

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, ...],
        more: Sequence[Any],
        devices: list[torch.device] | None,
        objective: Callable[[Any], Tensor],
        tolerance: float,
        strategy: str,
        options: dict[str, Any],
    ) -> None:
        self.shape, self.devices, self.objective, self.tolerance = shape, devices, objective, tolerance
        self.strategy, self.options = strategy, dict(options)
        self.levels = self.options.pop("checkpoint", None) or "all"
        split_size = self.options.pop("split_size", None)
        self.split_size = split_size if isinstance(split_size, int) else max(1, self.shape[0] // 2)
        self.notes: list[str] = []
        self.faults: list[VolsegError] = []
        home = devices[0] if devices is not None else self._spatial(net).communicator.home
        names, declared = [*signature(net.forward).parameters], self.options.get("batched")
        batched = declared and [names.index(name) if name in names else name for name in declared]
        self.subjects = {mode: Subject(net, mode, shape, more, home, objective, batched) for mode in (True, False)}
        self.shards = self._count_stages() if strategy == "pipeline" else self._count_shards()

    def _spatial(self, net: nn.Module) -> SpatialStrategy:
        return ModelParallel(
            copy.deepcopy(net), strategy="spatial", devices=self.devices, **self.options
        ).strategy.volumes

    def _count_shards(self) -> int:
        placed = self._spatial(self.subjects[True].net)
        shards: int = placed.communicator.num_shards
        if placed.dims_of(torch.Size(self.shape)) is None:
            # Every shard would compute the whole volume: the results would be equal, and the comparison empty.
            raise ParallelError(
                f"a volume of {self.shape} is too thin to be cut over {shards} devices, so nothing would be compared; "
                f"give a larger shape or fewer devices"
            )
        return shards

    def _count_stages(self) -> int:
        assert self.devices is not None
        if "cuts" not in self.options:
            self.options["cuts"] = _choose_even_cuts(self.subjects[True], self.split_size, len(self.devices))
        stages = len(self.options["cuts"]) + 1
        self.devices = self.devices[:stages]
        return stages

    def report(self, said: list[str]) -> Report:
        """Run every mode."""
        results = [self._compare(mode) for mode in self._modes()]
        tried = [result for result in results if result.outcome != "not compared"]
        if tried and all(result.outcome == "refused" for result in tried):
            raise self.faults[0]
        for subject in self.subjects.values():
            self.notes += subject.notes
        return Report(
            shape=self.shape,
            shards=self.shards,
            strategy=self.strategy,
            tolerance=self.tolerance,
            modes=tuple(results),
            notes=tuple(dict.fromkeys([*self.notes, *said])),
            devices=tuple(map(str, self.devices or ())),
        )

    def _modes(self) -> list[Mode]:
        if self.strategy == "pipeline":
            return self._pipeline_modes()
        again = (("checkpoint", self.levels),)
        modes = [
            Mode(True),
            Mode(True, "recomputed", again),
            Mode(False),
            Mode(False, "recomputed", again),
            Mode(False, "without gradients", gradients=False),
            Mode(True, "recorded", recorded=True),
            Mode(True, "recomputed, recorded", again, recorded=True),
        ]
        if self.devices is not None and self.devices[0].type == "cuda" and len(set(self.devices)) < len(self.devices):
            modes.append(Mode(True, "copies on the CPU", devices=tuple(make_copies(len(self.devices)))))
        return modes

    def _pipeline_modes(self) -> list[Mode]:
        assert self.devices is not None
        batch, size = self.shape[0], self.split_size
        cut, eager, remark = ("split_size", size), ("record", False), f"micro-batches of {size}"
        # Without a GPU, a recording repeats calls on one device.
        home = self.devices[0]
        places = None if home.type == "cuda" else (home,) * len(self.devices)
        return [
            Mode(True, "one micro-batch", (("split_size", batch), eager)),
            Mode(True, remark, (cut, eager), split_size=size),
            Mode(False, remark, (cut, eager), split_size=size),
            Mode(False, "without gradients", (cut, eager), split_size=size, gradients=False),
            Mode(True, "recorded", (cut, ("record", True)), split_size=size, recorded=True, devices=places),
        ]

    def _compare(self, mode: Mode) -> ModeResult:
        """Compare one mode with the plain network."""
        subject, first = self.subjects[mode.training], RECORDED_AFTER if mode.recorded else 0
        if reason := subject.trouble or self._impossible(mode):
            return ModeResult(name=mode.name, outcome="not compared", message=reason)
        key = STEPS + first, mode.gradients, mode.split_size
        theirs = subject.reference(*key)[first:]
        ignored = self._find_ignored(mode, theirs[0])
        try:
            ours, remark = self._run(mode, subject.net, STEPS + first)
            pairs = zip(theirs, ours[first:], strict=True)
            found = [compare_values(*pair, ignored, self.tolerance) for pair in pairs]
            if found[0].both_nan:
                self.notes.append(f"{mode.name}: NaN in the same places on both sides: {name_few(found[0].both_nan)}")
            return ModeResult.from_steps(mode.name, found, first + 1, message=remark)
        except _NothingToCompareError as reason:
            outcome, message = "not compared", str(reason)
        except VolsegError as fault:
            self.faults.append(fault)
            outcome, message = "refused", str(fault)
        except Exception as fault:  # counts as a difference: unsupported networks must raise a typed error
            outcome, message = "failed", f"{type(fault).__name__}: {fault}"
        return ModeResult(name=mode.name, outcome=outcome, message=message)

    def _impossible(self, mode: Mode) -> str:
        """Return why a mode cannot be run here; empty if it can."""
        home = self.subjects[mode.training].inputs[0].device
        if self.strategy == "spatial" and mode.recorded and home.type != "cuda":
            return "needs a GPU"
        if mode.split_size is not None and self.shape[0] <= mode.split_size:
            return f"a batch of {self.shape[0]} makes one micro-batch of {mode.split_size}; give a larger first side"
        return ""

    def _run(self, mode: Mode, net: nn.Module, steps: int) -> tuple[list[Values], str]:
        """Train a fresh copy on the devices; return the values after each step, and a remark."""
        devices: Sequence[torch.device] | None = self.devices if mode.devices is None else mode.devices
        subject = self.subjects[mode.training]
        if mode.recorded and self.strategy == "spatial" and devices is not None:
            devices = devices[:1]  # a step is recorded on one GPU of each process
        options = {**self.options, **dict(mode.options)}
        with seeded(0, list_gpus()):
            model = ModelParallel(copy.deepcopy(net), strategy=self.strategy, devices=devices, **options)
            recomputes = self.strategy == "spatial" and "checkpoint" in options
            if recomputes and not model.strategy.volumes.recomputation.blocks:
                raise _NothingToCompareError("the network has no block of two convolutions or more to recompute")
            if self.strategy == "spatial" and mode.recorded:
                return self._run_recorded(model, steps)
            step = eager_step(model, self.objective, mode.gradients)
            inputs = subject.inputs
            if mode.devices is not None:
                inputs = [value.to(mode.devices[0]) if isinstance(value, Tensor) else value for value in inputs]
            seen = observe(model, inputs, step, steps, subject.leaves)
        if mode.recorded and not model.strategy.is_replaying:
            return seen, "was not recorded, and ran eagerly"
        return seen, ""

    def _run_recorded(self, model: ModelParallel, steps: int) -> tuple[list[Values], str]:

        def step(*arguments: Any) -> Any:
            model.zero_grad(set_to_none=True)
            outputs = model(*arguments)
            self.objective(outputs).backward()
            return tree_map(whole, outputs)

        recorded = RecordedStep(model, step, warm_up=RECORDED_AFTER)
        try:
            seen = observe(model, self.subjects[True].inputs, lambda given: recorded(*given), steps, leaves=False)
        finally:
            recorded.release()
        return seen, f"was not recorded: {recorded.refused}" if recorded.refused else ""

    def _find_ignored(self, mode: Mode, theirs: Values) -> frozenset[str]:
        """Return the names of values with another meaning in this mode."""
        if mode.recorded and self.strategy == "spatial":  # a recording reads copies of the inputs
            return frozenset(name for name in theirs if find_kind(name) in ("input", "after"))
        if mode.split_size is not None and mode.training:
            if found := frozenset(name for name in theirs if name.endswith(RUNNING)):
                self.notes.append(
                    "running statistics by micro-batches are not compared: a pipeline takes those of the whole batch"
                )
            return found
        return frozenset()


def _choose_even_cuts(subject: Subject, split_size: int, stages: int) -> list[str]:
    """Return cuts into stages of about equally many calls; a pipeline may choose one stage for a tiny volume."""
    arguments = tuple(cut_pieces(subject.inputs, split_size, subject.batched)[0])
    with seeded(0, list_gpus()), torch.no_grad():
        _, trace, _ = observe_copy(subject.net, arguments, {}, subject.inputs[0].device)
    starts = [segment.calls[0].path for segment in list_segments(trace)]
    known = list(dict.fromkeys(path for path in starts[1:] if path and not starts[0].startswith(path)))
    if not known:
        raise ParallelError("the network has no place where a second stage could begin, so there is no pipeline of it")
    count = min(stages, len(known) + 1)
    return [known[len(known) * stage // count] for stage in range(count)][1:] or known[:1]
