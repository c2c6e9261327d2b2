"""Predict the label map of a preprocessed case on the image's original grid.

::

    image (C, D, H, W) -> windows -> model, mirrored or not -> softmax -> mean over mirrors and models
        -> windows blended by a Gaussian -> probabilities (K, D, H, W) -> original grid -> argmax -> labels

All steps except the last run slab by slab: see `streaming`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from monai.data import MetaTensor
from torch import Tensor, nn

from volseg.errors import BatchFieldError, ConfigError, NonFinitePredictionError
from volseg.inference.original_grid import Also, Decision, LabelRule, Prediction
from volseg.inference.streaming import Streamer, pad_shape
from volseg.inference.window_step import FastModels, Model, WindowStep, choose_windows_per_step
from volseg.inference.windows import MONAI, Windowing

Item = TypeVar("Item")

PASSES_UNTIL_RECORDED = 3
"""Number of passes of a `RecordedModel`: two without a recording, and the captured pass."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class Predictor:
    """A trained model and the settings to apply it to a whole volume.

    Parameters
    ----------
    model : callable or sequence of callables
        Each maps images ``(B, C, D, H, W)`` to logits ``(B, K, D, H, W)``. The probabilities of several models (the
        folds of a cross-validation) are averaged. An ``nn.Module`` runs in evaluation mode; afterwards its mode is
        restored.
    num_classes : int
        K: classes, with the background, or regions.
    values : sequence of int, optional
        Label value of each of the K outputs; their indices by default. A task's values are ``Task.output_values``.
    regions : bool
        Whether the K outputs are regions that may overlap. Each region has a sigmoid, and is painted over the regions
        before it where its probability exceeds one half; ``values`` is required. Otherwise the K outputs share a
        softmax.
    window : sequence of int, optional
        Sides of the sliding window (voxels). None: the whole volume at once. A smaller volume is padded with 0.
    overlap : float
        Fraction of a window that its neighbour shares, in [0, 1).
    mirror : bool or sequence of int
        Whether to average over all 8 mirrorings, or the axes to mirror (0, 1, 2 are D, H, W).
    windows_per_step : int, optional
        Windows per pass through the model. None: as many as keep a GPU busy and fit its memory; one on a CPU, or while
        the model is being trained.
    fast : bool
        Run networks on one GPU with volseg's kernels, recorded as a CUDA graph, if they support the network; labels are
        those of the plain network up to round-off. A recording keeps the memory of a pass until the predictor is
        deleted. A network with gradients is being trained, and runs unchanged.
    samples_per_pass : int
        Largest number of samples per pass if windows or whole volumes are mirrored.
    device : torch.device, optional
        Device of the computation. None: the device of the model's parameters, else that of the image.
    memory : int, optional
        Bytes that blending may use on that device. None: the free memory.
    autocast : torch.dtype, optional
        bfloat16 or float16 for the model's forward pass; softmax and averages are always float32.
    before_pass : callable, optional
        Called before each pass through a model, also between the windows of one volume; it may raise to stop.
    skip_background : bool
        Whether windows in which the image has only one value, such as clipped air, count as certain background and skip
        the model. Their number is logged.
    postprocess : callable, optional
        Applied to every label map ``(1, D, H, W)`` on the original grid; see
        `volseg.inference.postprocessing.Postprocessing`.
    """

    model: Model | Sequence[Model]
    num_classes: int
    values: Sequence[int] | None = None
    regions: bool = False
    window: Sequence[int] | None = None
    overlap: float = 0.5
    mirror: bool | Sequence[int] = False
    windows_per_step: int | None = None
    fast: bool = True
    samples_per_pass: int = 1
    device: torch.device | str | None = None
    memory: int | None = None
    autocast: torch.dtype | None = None
    before_pass: Callable[[], object] | None = None
    skip_background: bool = False
    postprocess: Callable[[MetaTensor], MetaTensor] | None = None

    step_kind: ClassVar[type[WindowStep]] = WindowStep
    """Class that applies the models to a batch of windows."""
    windowing: ClassVar[Windowing] = MONAI
    """Positions of the windows, and weights of their voxels."""

    def __post_init__(self) -> None:
        if unfit := [model for model in self.models if not callable(model) or hasattr(model, "outputs")]:
            raise ConfigError(
                f"model must map images to logits, got {type(unfit[0]).__name__}; for a Named network, pass its module"
            )
        if (self.values is None and self.regions) or (self.values is not None and len(self.values) != self.num_classes):
            raise ConfigError(
                f"needed: a value for each of the {self.num_classes} outputs of the network, got values={self.values}; "
                "pass Task.output_values"
            )
        if self.window is not None and (len(self.window) != 3 or min(self.window) < 1):
            raise ConfigError(f"window must be three sides in voxels, or None, got {list(self.window)}")
        if self.samples_per_pass < 1:
            raise ConfigError(f"samples_per_pass must be at least 1, got {self.samples_per_pass}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"overlap must be in [0, 1), got {self.overlap}")
        if not {0, 1, 2}.issuperset(self.mirror_axes):
            raise ConfigError(f"mirror must be True, False or a list of the axes 0, 1, 2, got {self.mirror}")
        if self.skip_background and (self.window is None or not self.window_step.link):
            which = "whole volumes" if self.window is None else "averaged logits, as in nnU-Net"
            raise ConfigError(f"skip_background needs windows of probabilities, got {which}; set it to false")

    @property
    def models(self) -> tuple[Model, ...]:
        """The model or models as a tuple."""
        return tuple(self.model) if isinstance(self.model, Sequence) else (self.model,)

    @property
    def mirror_axes(self) -> tuple[int, ...]:
        """The axes to mirror."""
        if isinstance(self.mirror, bool):
            return (0, 1, 2) if self.mirror else ()
        return tuple(self.mirror)

    @property
    def window_step(self) -> WindowStep:
        """The step that applies the models to a batch of windows."""
        return self.step_kind(
            models=self.models,
            num_classes=self.num_classes,
            regions=self.regions,
            mirror_axes=self.mirror_axes,
            autocast=self.autocast,
            before_pass=self.before_pass,
            samples_per_pass=self.samples_per_pass,
        )

    def __call__(self, case: Mapping[str, Any]) -> MetaTensor:
        """Return the label map ``(1, D, H, W)`` of one preprocessed case, on its image's original grid.

        Raises
        ------
        NonFinitePredictionError
            If a probability is not finite.
        OutOfMemoryError
            If not even one window fits into memory.
        """
        return self.predict([case])[0].labels

    def stream(
        self,
        cases: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 1,
        field: str = "image",
        also: Collection[Also] = (),
    ) -> Iterator[tuple[Mapping[str, Any], Prediction]]:
        """Yield each case with its prediction, on the CPU; volumes of equal size pass through the model together.

        A prediction does not depend on the other cases of its batch. Volumes smaller than the window have the size of
        the window. Cases are yielded in the order in which their groups fill, which may differ from the input order.
        ``also`` requests ``entropy`` and ``probabilities``; the latter need K times the image's voxels in float32.
        """
        for group in group_equal_sizes(cases, lambda case: pad_shape(case[field].shape[-3:], self.window), batch_size):
            yield from zip(group, self._predict_each(group, field, also), strict=True)
            del group  # otherwise it stays alive during the next read

    def predict(self, cases: Sequence[Mapping[str, Any]], *, also: Collection[Also] = ()) -> list[Prediction]:
        """Return the predictions of cases of one padded shape, on the CPU; see `stream`."""
        return list(self._predict_each(cases, "image", also))

    def _predict_each(
        self, cases: Sequence[Mapping[str, Any]], field: str, also: Collection[Also]
    ) -> Iterator[Prediction]:
        images = [_require_volume(case, field) for case in cases]
        with self._applied(images[0]) as streamer:
            found = streamer.predict(images, also)
        for case, image, prediction in zip(cases, images, found, strict=True):
            yield self._finish(case, image, prediction)

    def _finish(self, case: Mapping[str, Any], image: Tensor, prediction: Prediction | None) -> Prediction:
        """Return the finished prediction; raise if it is None, since a probability was not finite."""
        if prediction is None:
            raise NonFinitePredictionError(explain_not_finite(case, image, self.autocast))
        return self.finish(prediction)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities ``(B, K, D, H, W)`` float32 of preprocessed images ``(B, C, D, H, W)``.

        All probabilities are in memory at once: `stream` needs far less memory for label maps.
        """
        with self._applied(images) as streamer:
            return streamer.probabilities(images)

    def predict_share(
        self, image: MetaTensor, share: tuple[int, int], also: Collection[Also], into: Decision
    ) -> Prediction | None:
        """Predict part ``share`` of a volume along one axis into existing volumes; see `SharedPredictor`."""
        with self._applied(image) as streamer:
            (prediction,) = replace(streamer, share=share).predict([image], also, into)
        return prediction

    def finish(self, prediction: Prediction) -> Prediction:
        """Return a whole volume's prediction; its label map is the result of ``postprocess``."""
        if self.postprocess is None:
            return prediction
        return replace(prediction, labels=self.postprocess(prediction.labels))

    def warm_up(self, image: MetaTensor) -> None:
        """Run batches of empty windows, so that libraries choose kernels and the network is recorded."""
        assert self.window is not None
        with self._applied(image) as streamer:
            windows = torch.zeros(streamer.windows_per_step, len(image), *self.window, device=streamer.device)
            for _ in range(PASSES_UNTIL_RECORDED):
                streamer.step(windows)

    def begin(self, image: MetaTensor, also: Collection[Also]) -> Decision:
        """Return the empty volumes of a prediction."""
        with torch.inference_mode(False):  # the windows are computed outside of it
            return Decision(image, self.rule, also=also)

    @property
    def rule(self) -> LabelRule:
        """Rule for the labels."""
        of_logits = not self.window_step.link
        return LabelRule.of(self.num_classes, self.values, self.regions, of_logits=of_logits)

    @contextmanager
    def _applied(self, images: Tensor) -> Iterator[Streamer]:
        """Yield a streamer; meanwhile the models are in evaluation mode, without gradients."""
        device = self._choose_device(images)
        trained = any(parameter.grad is not None for parameter in self._list_parameters())
        fast = None if trained or not self.fast or self.window is None else _FAST.setdefault(self, FastModels())
        # Not inference_mode: training could not use the buffers that a sharded model keeps between steps, nor a
        # recording its inputs. Threads may share a predictor, and a replay overwrites the previous logits.
        with (
            fast.lock if fast else nullcontext(),
            torch.inference_mode(False),
            torch.no_grad(),
            evaluating(self.models),
        ):
            step = self.window_step
            if fast is not None:
                step = replace(step, models=fast.make(self.models, device))
            windows = self.windows_per_step or 1
            if self.windows_per_step is None and self.window is not None and not trained and device.type == "cuda":
                windows = choose_windows_per_step(step.models, self.window, self.num_classes, device)
            yield Streamer(self, step, self.rule, device, windows)

    def _list_parameters(self) -> list[nn.Parameter]:
        networks = [model for model in self.models if isinstance(model, nn.Module)]
        return [parameter for network in networks for parameter in network.parameters()]

    def _choose_device(self, images: Tensor) -> torch.device:
        if self.device is not None:
            return torch.device(self.device)
        return next((parameter.device for parameter in self._list_parameters()), images.device)


_FAST: WeakKeyDictionary[Predictor, FastModels] = WeakKeyDictionary()
"""Kept outside the predictors, so that a copy of a predictor, also in another process, builds its own."""


@contextmanager
def evaluating(models: Iterable[Model]) -> Iterator[None]:
    """Put modules into evaluation mode; afterwards restore the mode of each submodule."""
    networks = [model for model in models if isinstance(model, nn.Module)]
    modes = [(module, module.training) for network in networks for module in network.modules()]
    try:
        if any(mode for _, mode in modes):  # setting all modes for each case takes as long as a layer
            for network in networks:
                network.eval()
        yield
    finally:
        for module, mode in modes:  # one by one: a part may be in evaluation mode on purpose
            if module.training != mode:
                module.training = mode


def group_equal_sizes(
    items: Iterable[Item], size_of: Callable[[Item], tuple[int, ...]], batch_size: int
) -> Iterator[list[Item]]:
    """Group items of equal size, ``batch_size`` per group; only a few incomplete groups wait."""
    waiting: dict[tuple[int, ...], list[Item]] = defaultdict(list)
    for item in items:
        size = size_of(item)
        waiting[size].append(item)
        del item
        if len(waiting[size]) == batch_size:
            yield waiting.pop(size)
        elif sum(map(len, waiting.values())) >= 4 * batch_size:
            yield waiting.pop(next(iter(waiting)))  # the size that has waited longest
    yield from waiting.values()


def explain_not_finite(case: Mapping[str, Any], image: Tensor, autocast: torch.dtype | None) -> str:
    """Return the likely cause of a non-finite prediction, and the remedy."""
    if not image.isfinite().all():
        remedy = "the preprocessed image is not finite either: check the file"
    elif autocast is torch.float16:
        remedy = "float16 may overflow: predict in bfloat16 or float32"
    else:
        remedy = "the weights may have diverged: use another checkpoint"
    return f"case {case.get('case', '(unnamed)')}: the model returned probabilities that are not finite; {remedy}"


def _require_volume(case: Mapping[str, Any], field: str) -> MetaTensor:
    """Return a case's volume; raise unless it has an affine."""
    volume = case[field]
    if not isinstance(volume, MetaTensor):
        raise BatchFieldError(
            f"{field} needs the affine of its voxels, as in a MetaTensor from volseg.read_volume, got a "
            f"{type(volume).__name__}; for plain tensors (B, C, D, H, W) use Predictor.probabilities"
        )
    return volume


# One volume on several devices: each device decides a part of it, along the streamed axis.
#
# ::
#
#     planes ->   | device 0 decides these      | device 1 decides these      |                 | ---windows--- |     |
# ---windows--- |                               | ---windows--- |   both compute the windows across the border One
# device computes the sum of a voxel, window by window in the same order. So labels do not depend on the number of
# devices, except that a library's kernels may depend on the number of windows in a pass. There is a thread per device;
# all write their labels into one label map on the CPU.


class SharedPredictor:
    """Predictors on different devices, each with its own copy of the models."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        if not predictors or predictors[0].window is None:
            raise ConfigError(
                "a volume is divided between devices by windows, but inference.window is null; predict it on one "
                "device, or set a window"
            )
        self.predictors = predictors
        self._is_warm = False

    @property
    def device(self) -> torch.device | str | None:
        """Device that prepares images: the first predictor's."""
        return self.predictors[0].device

    def predict(self, cases: Sequence[Mapping[str, Any]], *, also: Collection[Also] = ()) -> list[Prediction]:
        """Return the predictions of cases, on the CPU, one after the other; see `Predictor.stream`."""
        return [self._predict(case, also) for case in cases]

    def _predict(self, case: Mapping[str, Any], also: Collection[Also]) -> Prediction:
        first, image = self.predictors[0], case["image"]
        if not self._is_warm:
            # Before threads start, since work of other threads must not break a capture.
            for predictor in self.predictors:
                with _select(predictor) as device:
                    if device.type == "cuda":
                        predictor.warm_up(image)
            self._is_warm = True
        volumes = first.begin(image, also)

        def predict_part(number: int) -> Prediction | None:
            predictor = self.predictors[number]
            with _select(predictor):
                return predictor.predict_share(image, (number, len(self.predictors)), also, volumes)

        with ThreadPoolExecutor(len(self.predictors), "share") as threads:
            found = list(threads.map(predict_part, range(len(self.predictors))))
        return first._finish(case, image, None if None in found else found[0])


@contextmanager
def _select(predictor: Predictor) -> Iterator[torch.device]:
    """Make a predictor's device the current one."""
    device = torch.device(predictor.device or "cpu")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield device
