"""Apply the models to a batch of windows, for every mirroring, and average their probabilities."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import is_recording
from volseg.device.torch_internals import is_compiled
from volseg.errors import GridError, ParallelError
from volseg.parallel import CompiledNetwork, FastKernels, ModelParallel
from volseg.parallel.fast_kernels import explain_absence
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.recorded_step import RecordedStep

logger = logging.getLogger(__name__)


Model = Callable[[Tensor], Any]
"""Maps ``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)``; `full_logits` lists other accepted outputs."""


LINKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "": lambda values, _: values,
    "softmax": lambda logits, dim: logits.float().softmax(dim),
    "sigmoid": lambda logits, _: logits.float().sigmoid(),
}
"""Functions from logits to blended values, by name; the second argument is the dim of the classes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowStep:
    """Models, and the mirrorings of a batch of windows for them.

    Parameters
    ----------
    models : sequence of callables
        Each maps windows ``(B, C, d, h, w)`` to logits ``(B, K, d, h, w)``. They are in evaluation mode.
    num_classes : int
        K: classes, with the background, or regions.
    regions : bool
        Whether each of the K outputs has a sigmoid, instead of a shared softmax.
    mirror_axes : sequence of int
        Axes to mirror, in all combinations; 0, 1, 2 are d, h, w.
    autocast : torch.dtype, optional
        Type of the models' autocast; later computation is float32.
    before_pass : callable, optional
        Called before each pass through a model; it may raise to stop.
    samples_per_pass : int
        Largest number of samples per pass through a model if windows are mirrored; a pass has at least one mirroring.
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
        """Name in `LINKS` of the function from logits to blended values; empty if logits are blended."""
        return "sigmoid" if self.regions else "softmax"

    @property
    def num_passes(self) -> int:
        """Passes of each window through a model."""
        return len(self.models) * 2 ** len(self.mirror_axes)

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the mean of the blended values over all passes, probabilities by default: ``(B, K, d, h, w)``."""
        total: Tensor | None = None
        for logits, dims in self.passes(windows):
            one = LINKS[self.link](logits, 1)
            one = one.flip(dims) if dims else one
            # Logits are copied: a recorded network's next pass overwrites the previous result.
            total = (one if self.link else one.clone()) if total is None else total.add_(one)
        assert total is not None
        return total.div_(self.num_passes)

    def passes(self, windows: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the logits ``(B, K, d, h, w)`` of each pass, mirrored like the windows, and the mirrored dims.

        Raises
        ------
        GridError
            If a model returns another output.
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
    """Return the logits at full resolution, unsharded.

    A list or tuple is the output of deep supervision, full resolution first. A volume sharded over devices is gathered
    by its ``full_tensor`` (a collective: every process of the group must predict).
    """
    if isinstance(output, list | tuple):
        output = output[0]
    if hasattr(output, "full_tensor"):
        output = output.full_tensor()
    if not isinstance(output, Tensor):
        raise GridError(f"the model must return logits as a tensor, got {type(output).__name__}")
    return output


# Capture the pass of a trained network over a batch of windows once, and replay it. A volume has hundreds of windows of
# one shape, with the same kernels each time. The kernels of a small network, or of ``FastKernels``, take longer to
# launch from Python than to run. Mirrorings and the processing of logits stay outside the capture: they are a few
# kernels, and the same capture can then be used for every mirroring.
#
# The capture is a `RecordedStep`, as in training, with the same checks: a network that reads values on the host, or
# changes Python state, runs kernel by kernel, with one message in the log.


WARM_UP = 2
"""Passes per shape before the capture: in the first, cuDNN and Triton choose and compile their kernels."""

SHAPES = 2
"""Shapes of window batches to capture: full batches, and the last batch of a volume."""

VOXELS_PER_STEP = 2**21
"""Voxels per pass through the network, one window of 128^3: fewer leave a GPU idle. With torch's kernels, the number is
doubled: DynUNet takes 1.5 times as long with one window per pass ("plain" in dynunet_h200_predictor.json)."""

MOST_WINDOWS = 32

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

STEP_MEMORY = 1 / 8
"""Part of a GPU's free memory for the logits and probabilities of a batch of windows."""

BYTES_PER_LOGIT = 16
"""Bytes per logit: in 16 bits, in float32, as a probability, and the sum over passes."""


class RecordedModel(nn.Module):
    """Run a network on one GPU as a captured graph, one per input shape.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode at each call; another mode needs another capture.
    shares : RecordedModel, optional
        A model that may share the memory of its captures, because its logits are used before this model runs.
    kernels : bool
        Run the network with `FastKernels` if they support it.

    Raises
    ------
    ParallelError
        If the network is not on one GPU.
    """

    def __init__(self, model: nn.Module, shares: "RecordedModel | None" = None, *, kernels: bool = False) -> None:
        super().__init__()
        self._plain: nn.Module | None = None
        if kernels and (wrapped := _wrap(model)) is not None:
            self._plain, model = model, wrapped
        self.model = model
        self._step: RecordedStep = RecordedStep(
            model,
            self._run,
            warm_up=WARM_UP,
            limit=SHAPES,
            shares=None if shares is None else shares._step,
            name="the network that predicts",
            advice="set inference.record to false, or pass Predictor(fast=False)",
        )

    def _run(self, windows: Tensor) -> Tensor:
        try:
            return full_logits(self.model(windows))
        except Exception as fault:  # also from a network that expects torch's own tensors
            if self._plain is None or isinstance(fault, torch.OutOfMemoryError):
                raise
            if not isinstance(fault, ParallelError) and is_recording(windows.device):
                raise  # a step that waits for values cannot be captured with any kernels
            # An error that is not a refusal may be a bug of the kernels, which the user should know.
            level = logging.INFO if isinstance(fault, ParallelError) else logging.WARNING
            logger.log(level, "%s predicts with torch's kernels: %s", type(self._plain).__name__, fault)
            self.model, self._plain = self._plain, None
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
        """Reason why the network is not captured, or None."""
        return self._step.refused

    def release(self) -> None:
        """Free the captures; later calls capture again."""
        self._step.release()


def _wrap(network: nn.Module) -> FastKernels | None:
    """Return a plain network with volseg's kernels, or None if unsupported; its parameters keep their layout."""
    device = next(chain(network.parameters(), network.buffers())).device
    other = isinstance(network, FastKernels | CompiledNetwork) or any(map(is_compiled, network.modules()))
    if other or explain_absence(device) is not None:
        return None
    given = [(parameter, parameter.data) for parameter in network.parameters()]
    try:
        return FastKernels(network, device)
    except ParallelError as fault:
        logger.info("%s predicts with torch's kernels: %s", type(network).__name__, fault)
        return None
    finally:
        for parameter, data in given:  # an optimizer may have state in this layout
            parameter.data = data


def record_models(models: Sequence[Model], *, kernels: bool = False) -> tuple[Model, ...]:
    """Return each network as a `RecordedModel` if that is possible, else unchanged.

    Models on a CPU or on several devices, and models that are not an ``nn.Module``, stay unchanged. The captures share
    memory: use the logits of one model before the next model runs.
    """
    recorded: list[Model] = []
    first: RecordedModel | None = None
    for model in models:
        if (reason := explain_kernel_by_kernel(model)) is None:
            assert isinstance(model, nn.Module)
            one = RecordedModel(model, shares=first, kernels=kernels)
            recorded.append(one)
            first = first or one
        else:
            logger.debug("%s is not recorded: %s", type(model).__name__, reason)
            recorded.append(model)
    return tuple(recorded)


class FastModels:
    """A predictor's models with fast kernels and recordings; threads must hold ``lock`` to use them."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._models: tuple[Model, ...] = ()
        self._device: torch.device | None = None

    def make(self, models: Sequence[Model], device: torch.device) -> tuple[Model, ...]:
        """Return the fast models, built at the first call, and again after the networks moved to another device."""
        if self._device != device:
            self._models, self._device = record_models(models, kernels=True), device
        return self._models


def explain_kernel_by_kernel(model: Any) -> str | None:
    """Return why a model's pass cannot be captured, as the end of a sentence, or None if a capture can be tried."""
    if not isinstance(model, nn.Module):
        return "it is a function, and its dependencies are unknown"
    if isinstance(model, RecordedModel):
        return "it is already recorded"
    if (isinstance(model, ModelParallel) and not isinstance(model, FastKernels)) or any(
        isinstance(part, nn.DataParallel) and len(part.device_ids) > 1 for part in model.modules()
    ):
        return "it runs on several devices together"
    if any(isinstance(part, ModelParallel) for part in model.modules() if part is not model):
        return "a part of it has its own strategy"
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"recordings need one GPU, but it is on {sorted(map(str, devices))}"
    return None


def choose_windows_per_step(
    models: Sequence[Model],
    window: Sequence[int],
    num_classes: int,
    device: torch.device,
    *,
    free_bytes: int | None = None,
) -> int:
    """Return the windows per pass through the network: as many as keep the device busy and fit its memory.

    Parameters
    ----------
    models : sequence of callables
        The networks; with torch's kernels more windows keep a GPU busy.
    window : sequence of int
        Sides of a window (voxels).
    num_classes : int
        Outputs of the network: a step needs several times the window for each of them.
    device : torch.device
        A CPU computes one window at a time: several windows exceed its cache sooner.
    free_bytes : int, optional
        Free bytes of the device's memory; measured by default.

    Raises
    ------
    ParallelError
        If the device is neither a GPU nor a CPU.
    """
    if device.type == "cpu":
        return 1
    if device.type != "cuda":
        raise ParallelError(f"windows can be computed on a CPU or a GPU, got {device}")
    free = torch.cuda.mem_get_info(device)[0] if free_bytes is None else free_bytes
    voxels = math.prod(window)
    fit = int(STEP_MEMORY * free / (BYTES_PER_LOGIT * num_classes * voxels))
    parts = [part for model in models if isinstance(model, nn.Module) for part in model.modules()]
    if any(isinstance(part, BATCH_NORMS) and part.running_mean is None for part in parts):
        return 1  # its statistics are those of the batch: a window would depend on the others
    wanted = VOXELS_PER_STEP if any(isinstance(part, FastKernels) for part in parts) else 2 * VOXELS_PER_STEP
    return max(1, min(wanted // voxels, fit, MOST_WINDOWS))
