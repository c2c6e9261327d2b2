"""Compare a new recording with an eager run of the same batch, outputs and gradients, before trusting it.

Done once per recording, so that an error of a recording on some device or version of torch costs speed, not
correctness. Networks that draw random numbers cannot be compared and are accepted.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import has_values, is_gpu
from volseg.device.torch_internals import TorchDispatchMode, pytree
from volseg.parallel.pipeline.flow.placement import PlacedRun, Placement
from volseg.parallel.pipeline.flow.statistics import FrozenStatistics
from volseg.parallel.pipeline.micro_batch import Call, copy_call, join
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.record.passage import RecordRefusedError
from volseg.parallel.pipeline.record.replay import Replay
from volseg.parallel.state.random import RandomState

__all__ = ["Rehearsal", "rehearse"]

# The same kernels on the same shapes: only the order of atomic sums may differ, and TF32 within float32.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}
HALF = 5e-2

SHOWN = 3
"""Wrong gradients named in a message."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Results of an eager run."""

    outputs: list[Tensor]
    gradients: dict[int, Tensor]
    """By the identity of the parameter."""
    names: dict[int, str]

    def find_disagreement(self, replay: Replay, tensors: Sequence[Tensor]) -> str | None:
        """Replay the same batch; describe a difference, or return ``None``."""
        found = replay.forward(tensors, commits=False)
        if not all(has_values(output.device) for output in found):  # fake tensors agree, and only memory is taken
            if self.gradients:
                replay.backward([_make_cotangent(output) for output in found], len(tensors))
            return None
        for number, (mine, expected) in enumerate(zip(found, self.outputs, strict=True)):
            if not _agree(mine, expected, expected):
                pieces = zip(mine.split(replay.sizes), expected.split(replay.sizes), strict=True)
                wrong = [str(index) for index, (one, other) in enumerate(pieces) if not _agree(one, other, expected)]
                distance = _describe_distance(mine, expected, expected)
                return (
                    f"output {number} differs from the eager run: off by {distance} in micro-batches "
                    f"{', '.join(wrong)} of {len(replay.sizes)}"
                )
        if not self.gradients:
            return None
        gradients = replay.backward([_make_cotangent(output) for output in found], len(tensors))[len(tensors) :]
        got = {id(p): g for p, g in zip(replay.parameters, gradients, strict=True) if g is not None}
        if got.keys() != self.gradients.keys():
            return "gradients reach other parameters than in the eager run"
        # A bias before a norm has a gradient of pure round-off: scale by the largest of all gradients.
        scale = max(self.gradients.values(), key=lambda gradient: float(gradient.abs().max()))
        off = [
            f"{self.names[key]} by {_describe_distance(got[key], expected, scale)}"
            for key, expected in self.gradients.items()
            if not _agree(got[key], expected, scale)
        ]
        if off:
            return f"a gradient differs from the eager run: {', '.join(off[:SHOWN])}" + (
                f" and {len(off) - SHOWN} more" if len(off) > SHOWN else ""
            )
        return None


def rehearse(net: nn.Module, placement: Placement, calls: Sequence[Call], sizes: Sequence[int]) -> Rehearsal | None:
    """Run copies of the micro-batches eagerly; ``None`` if they draw random numbers.

    Raises
    ------
    RecordRefusedError
        If forward changes its arguments, or draws numbers that a replay would not draw.
    """
    devices = [at.device for at in placement.locations]
    drawn, on_host = RandomState(devices), RandomState([], foreign=False)
    drawing, is_traced = _Drawing(), not all(map(has_values, devices))
    try:
        borrowed: dict[Any, Tensor] = {}
        results = []
        for args, kwargs in map(copy_call, calls):
            read = [(tensor, runs.read_version(tensor)) for tensor in runs.find_tensors((args, kwargs))]
            with drawing if is_traced else nullcontext(), PlacedRun(placement, FrozenStatistics(), borrowed):
                results.append(net(*args, **kwargs))
            if runs.find_changes(read):
                raise RecordRefusedError("forward changes its arguments in place")
        if drawn.foreign_moved():
            raise RecordRefusedError("forward draws random numbers of Python or NumPy, which a replay would not")
        if on_host.torch_moved() and any(map(is_gpu, devices)):
            raise RecordRefusedError("forward draws random numbers on the host, which a replay would not")
        if drawn.torch_moved() or drawing.draws:
            return None
    finally:
        drawn.put_back()
    outputs = [leaf for leaf in pytree.tree_leaves(join(results, sizes)) if isinstance(leaf, Tensor)]
    rooted = [output for output in outputs if output.requires_grad]
    wanted = [parameter for parameter in net.parameters() if parameter.requires_grad]
    gradients: dict[int, Tensor] = {}
    if rooted and wanted:
        found = torch.autograd.grad(rooted, wanted, [_make_cotangent(output) for output in rooted], allow_unused=True)
        gradients = {id(p): g for p, g in zip(wanted, found, strict=True) if g is not None}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return Rehearsal([output.detach() for output in outputs], gradients, names)


class _Drawing(TorchDispatchMode):
    """Detect random draws: on fake tensors no generator advances."""

    draws = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def _make_cotangent(output: Tensor) -> Tensor | None:
    """Return a gradient of ``output``, the same each time, without drawing it."""
    if not output.is_floating_point():
        return None
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return steps.mul_(0.7).cos_().view(output.shape).to(output.dtype)


def _agree(mine: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Return whether two tensors differ by at most round-off of ``scale``; both infinite or both NaN agree."""
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return False
    if not mine.is_floating_point():
        return float((mine.to(expected.device) != expected).float().mean()) < HALF
    allowed = TOLERANCE.get(mine.dtype, HALF) * float(scale.abs().max())
    return torch.allclose(mine.to(expected.device), expected, rtol=0, atol=allowed, equal_nan=True)


def _describe_distance(mine: Tensor, expected: Tensor, scale: Tensor) -> str:
    """Describe the largest difference, as a share of the largest value of ``scale``."""
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return f"shape or type ({tuple(mine.shape)} {mine.dtype} for {tuple(expected.shape)} {expected.dtype})"
    largest = float((mine.to(expected.device).double() - expected.double()).abs().max())
    return f"{largest:.1e} (values up to {float(scale.abs().max()):.1e})"
