"""A batch of windows through the models: every model, every mirroring, and the mean of their probabilities."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from volseg.errors import GridError, ParallelError
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.recorded_step import RecordedStep

__all__ = ["Model", "RecordedModel", "WindowStep", "choose_windows_per_step", "full_logits", "record_models"]

logger = logging.getLogger(__name__)


Model = Callable[[Tensor], Any]
"""``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)``; see `full_logits` for what else may come back."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowStep:
    """Models, and the mirrorings in which they see a batch of windows.

    Parameters
    ----------
    models : sequence of callables
        Each maps windows ``(B, C, d, h, w)`` to logits ``(B, K, d, h, w)``. Already in evaluation mode.
    num_classes : int
        K: classes, with the background, or regions.
    regions : bool
        Whether the K have a sigmoid each, instead of a softmax that they share.
    mirror_axes : sequence of int
        Axes of which every subset is mirrored in turn; 0, 1, 2 are d, h, w.
    autocast : torch.dtype, optional
        For the models; what follows them is float32.
    before_pass : callable, optional
        Called before each pass through a model; it may raise to leave.
    samples_per_pass : int
        Most that go through a model together where windows are mirrored: so many of their mirrorings, one at least.
    """

    models: Sequence[Model]
    num_classes: int
    regions: bool = False
    mirror_axes: Sequence[int] = ()
    autocast: torch.dtype | None = None
    before_pass: Callable[[], object] | None = None
    samples_per_pass: int = 1

    @property
    def link(self) -> str:
        """What makes a pass's logits what is blended: ``softmax``, ``sigmoid``, or nothing."""
        return "sigmoid" if self.regions else "softmax"

    @property
    def num_passes(self) -> int:
        """How often each window goes through a model."""
        return len(self.models) * 2 ** len(self.mirror_axes)

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the mean over all passes of the softmax, or of the sigmoids: ``(B, K, d, h, w)`` float32."""
        total: Tensor | None = None
        for logits, dims in self.passes(windows):
            one = logits.float().sigmoid() if self.regions else logits.float().softmax(1)
            one = one.flip(dims) if dims else one
            total = one if total is None else total.add_(one)
        assert total is not None
        return total.div_(self.num_passes)

    def passes(self, windows: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the logits ``(B, K, d, h, w)`` of each pass, as mirrored as the windows were, and the mirrored dims.

        Raises
        ------
        GridError
            If a model returns something else.
        """
        axes = self.mirror_axes
        mirrorings = [flips for count in range(len(axes) + 1) for flips in combinations(axes, count)]
        dims = [[axis - 3 for axis in flips] for flips in mirrorings]
        together = max(1, self.samples_per_pass // len(windows))
        for model in self.models:
            for first in range(0, len(dims), together):
                report_progress("predict")
                if self.before_pass is not None:
                    self.before_pass()
                own = dims[first : first + together]
                mirrored = [windows.flip(each) if each else windows for each in own]
                given = mirrored[0] if len(mirrored) == 1 else torch.cat(mirrored)
                with torch.autocast(windows.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                    logits = full_logits(model(given))
                self._check(logits, given)
                yield from zip(logits.split(len(windows)), own, strict=True)

    def _check(self, logits: Tensor, windows: Tensor) -> None:
        wanted = (windows.shape[0], self.num_classes, *windows.shape[2:])
        if tuple(logits.shape) != wanted:
            raise GridError(
                f"the model must return logits (B, K, D, H, W) = {wanted} with one channel per "
                f"{'region' if self.regions else 'class, background included'}, got {tuple(logits.shape)}"
            )


def full_logits(output: Any) -> Tensor:
    """Return the logits at full resolution and in one piece.

    A list or tuple is deep supervision, full resolution first; a volume sharded over devices is gathered by its
    ``full_tensor`` (a collective: every process of the group must predict).
    """
    if isinstance(output, list | tuple):
        output = output[0]
    if hasattr(output, "full_tensor"):
        output = output.full_tensor()
    if not isinstance(output, Tensor):
        raise GridError(f"the model must return logits as a tensor, got {type(output).__name__}")
    return output


# A trained network whose pass over a batch of windows is recorded once and then replayed.
#
# A volume is hundreds of windows of one shape: the same kernels each time. Launched one by one from Python, those of a
# small network, or those of ``FastKernels``, take longer to launch than to run. Mirrorings and what follows the logits
# stay outside of the recording: they are a few kernels, and one recording then serves every mirroring.
#
# It is a recorded step like a training's (`RecordedStep`), so the same is watched: a network that looks at values, or
# changes something in Python, runs kernel by kernel, and that is said once.


WARM_UP = 2
"""Passes of a shape that run as they are: cuDNN and Triton choose and compile their kernels in the first one."""

SHAPES = 2
"""Batches of windows that are recorded: full ones, and the last one of a volume."""

VOXELS_PER_STEP = 2**21
"""Voxels that go through the network together, one window of 128^3: the kernels of fewer leave a GPU idle."""

MOST_WINDOWS = 32

STEP_MEMORY = 1 / 8
"""Part of a GPU's free memory that the logits and probabilities of a batch of windows may take."""

BYTES_PER_LOGIT = 16
"""Of a logit on its way: in 16 bits, in float32, as a probability, and the sum over passes."""


class RecordedModel(nn.Module):
    """Run a network on one GPU as a recording, per shape of its input.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode when it is called; with another mode it is recorded anew.
    shares : RecordedModel, optional
        One whose recordings may take the same memory, because its logits are used up before this one runs.

    Raises
    ------
    ParallelError
        If the network does not lie on one GPU.
    """

    def __init__(self, model: nn.Module, shares: "RecordedModel | None" = None) -> None:
        super().__init__()
        self.model = model
        self._step: RecordedStep = RecordedStep(
            model,
            self._run,
            warm_up=WARM_UP,
            limit=SHAPES,
            shares=None if shares is None else shares._step,
            name="the network that predicts",
            advice="set inference.record to false",
        )

    def _run(self, windows: Tensor) -> Tensor:
        return full_logits(self.model(windows))

    def forward(self, windows: Tensor) -> Tensor:
        """Return the logits of windows ``(B, C, d, h, w)``; the next call overwrites them."""
        return self._step(windows)

    @property
    def num_recorded(self) -> int:
        """Shapes recorded so far."""
        return self._step.num_recorded

    @property
    def refused(self) -> str | None:
        """Why it is not recorded, or None."""
        return self._step.refused

    def release(self) -> None:
        """Free the recordings; later calls run as they are first, as in the beginning."""
        self._step.release()


def record_models(models: Sequence[Model]) -> tuple[Model, ...]:
    """Return each network as a `RecordedModel` where it can be one, else as it is.

    Not on a CPU, and not what lies on several devices or is no ``nn.Module``. Their recordings share memory: use the
    logits of one before the next one runs.
    """
    recorded: list[Model] = []
    first: RecordedModel | None = None
    for model in models:
        if (reason := explain_kernel_by_kernel(model)) is None:
            assert isinstance(model, nn.Module)
            first = first or RecordedModel(model)
            recorded.append(first if first.model is model else RecordedModel(model, shares=first))
        else:
            logger.debug("%s is not recorded: %s", type(model).__name__, reason)
            recorded.append(model)
    return tuple(recorded)


def explain_kernel_by_kernel(model: Any) -> str | None:
    """Return why a model's pass cannot be recorded, as the end of a sentence; None where that can be tried."""
    if not isinstance(model, nn.Module):
        return "it is a function, of which nobody can tell what it depends on"
    if isinstance(model, ModelParallel) and not isinstance(model, FastKernels):
        return "it works on several devices together"
    if any(isinstance(part, ModelParallel) for part in model.modules() if part is not model):
        return "a part of it has a strategy of its own"
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"recordings are of one GPU, and it lies on {sorted(map(str, devices))}"
    return None


def choose_windows_per_step(
    window: Sequence[int], num_classes: int, device: torch.device, *, free_bytes: int | None = None
) -> int:
    """Return how many windows go through the network together: as many as keep the device busy and fit its memory.

    Parameters
    ----------
    window : sequence of int
        Sides (voxels).
    num_classes : int
        Outputs of the network: for each of them a step holds the window several times.
    device : torch.device
        A CPU takes one window at a time: more of them only leave its cache sooner.
    free_bytes : int, optional
        Of the device's memory; asked for by default.

    Raises
    ------
    ParallelError
        If the device is neither a GPU nor a CPU.
    """
    if device.type == "cpu":
        return 1
    if device.type != "cuda":
        raise ParallelError(f"windows are computed on a CPU or a GPU, got {device}")
    free = torch.cuda.mem_get_info(device)[0] if free_bytes is None else free_bytes
    voxels = math.prod(window)
    fit = int(STEP_MEMORY * free / (BYTES_PER_LOGIT * num_classes * voxels))
    return max(1, min(VOXELS_PER_STEP // voxels, fit, MOST_WINDOWS))
