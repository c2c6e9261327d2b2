"""Convert whole volumes to label maps slab by slab: blend, resample to the image's grid, decide, discard.

The memory for all classes does not grow with the volume along one axis; along the others, the volume is cut until the
classes fit.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from monai.data import MetaTensor
from torch import Tensor, nn
from torch.nn.functional import pad

from volseg.errors import OutOfMemoryError
from volseg.inference.blending import Slab, blend_slabs
from volseg.inference.original_grid import Also, Decision, LabelRule, Prediction
from volseg.inference.sampling import Held
from volseg.inference.window_step import WindowStep
from volseg.inference.windows import HELD_WHOLE_BYTES, BlendPlan, plan_blend
from volseg.memory import available_bytes
from volseg.parallel import FastKernels, ModelParallel

if TYPE_CHECKING:
    from volseg.inference.predictor import Predictor

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4

FEATURES = 256
"""Guess of a network's memory per voxel of a window, in channels of float32. If the guess is too low, another attempt
uses less memory for the blend."""


@dataclass(frozen=True, slots=True, eq=False)
class Streamer:
    """Converts volumes of one shape to label maps within the available memory.

    Parameters
    ----------
    predictor : Predictor
        The models, in evaluation mode, and all settings.
    step, rule
        Its ``window_step`` and ``rule``.
    device : torch.device
        Device of the models, which also blends and decides.
    windows_per_step : int
        Windows per pass through the models.
    share : (int, int)
        Index of the part of each volume to predict, and number of parts; with more than one, `predict` needs ``into``.
    """

    predictor: "Predictor"
    step: WindowStep
    rule: LabelRule
    device: torch.device
    windows_per_step: int
    share: tuple[int, int] = (0, 1)

    @property
    def window(self) -> Sequence[int] | None:
        """Sides of the sliding window (voxels). None: the whole volume at once."""
        return self.predictor.window

    def predict(
        self, images: Sequence[MetaTensor], also: Collection[Also] = (), into: Decision | None = None
    ) -> list[Prediction | None]:
        """Return a prediction for each image, on the CPU; None if a probability is not finite.

        All images have one shape, if necessary after padding to the window. A single image may fill existing volumes
        ``into``.

        Raises
        ------
        OutOfMemoryError
            If not even one window fits into memory.
        """
        if self.window is None:
            return self._predict_unwindowed(images, also)
        predictions: list[Prediction | None] = []
        budget = self._find_budget(images[0])
        while len(predictions) < len(images):
            plan = self._plan(images[0], budget)
            taken = plan.held_bytes(self.step.num_classes)
            most = max(1, min(HELD_WHOLE_BYTES, budget) // taken) if plan.whole else 1
            together = images[len(predictions) : len(predictions) + most]
            try:
                predictions += self._predict_by(plan, together, also, into)
                continue
            except torch.OutOfMemoryError as fault:
                if not self._may_start_again():
                    raise
                if taken <= self._count_window_bytes(self.step.num_classes):
                    raise OutOfMemoryError(self._explain(fault)) from fault
                reason = str(fault).partition("\n")[0]
            # Outside the block above, whose exception keeps the failed tensors alive.
            torch.cuda.empty_cache()
            budget = taken // 2
            logger.warning(
                "%s Trying again with a blend of at most %s instead of %s.", reason, _say(budget), _say(taken)
            )
        return predictions

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities ``(B, K, D, H, W)`` float32 of images ``(B, C, D, H, W)``, all in memory at once."""
        if self.window is None:
            return self.step(images.to(self.device)).to(self.device)  # a pipeline's output is elsewhere
        depth, height, width = images.shape[-3:]
        shape = pad_shape(images.shape[-3:], self.window)
        w, _, h, _, d, _ = margins = _compute_margins(images.shape[-3:], shape)
        everything = 2**63
        plan = plan_blend(
            shape, self.window, self.predictor.overlap, self.step.num_classes, everything,
            most_whole=everything, windowing=self.predictor.windowing,
        )  # fmt: skip
        (slab,) = self._blend(plan, pad(images, margins))
        return slab.blend[:, :, d : d + depth, h : h + height, w : w + width]

    def _predict_unwindowed(self, images: Sequence[MetaTensor], also: Collection[Also]) -> list[Prediction | None]:
        probabilities = self.probabilities(torch.stack([image.as_tensor() for image in images]))
        depth, height, width = images[0].shape[-3:]
        everything = range(depth), range(height), range(width)
        predictions = []
        for image, of_image in zip(images, probabilities, strict=True):
            decision = Decision(image, self.rule, also=also)
            decision.fill(Held(of_image), everything, everything, (0, 0, 0))
            predictions.append(decision.finish())
        return predictions

    def _predict_by(
        self, plan: BlendPlan, images: Sequence[MetaTensor], also: Collection[Also], into: Decision | None
    ) -> list[Prediction | None]:
        decisions = [Decision(image, self.rule, also=also) if into is None else into.join() for image in images]
        margins = [_compute_margins(image.shape[-3:], plan.shape)[-2::-2] for image in images]  # before D, H, W
        for slab in self._blend(plan, _stack(images, plan.shape)):
            for decision, of_image, margin in zip(decisions, slab.blend, margins, strict=True):
                decision.fill(Held(of_image, slab.origin), slab.finished, slab.ready, margin)
        return [decision.finish() for decision in decisions]

    def _blend(self, plan: BlendPlan, images: Tensor) -> Iterator[Slab]:
        """Yield the slabs of all strips."""
        # Windows are cut on the device if the image needs a small part of its free memory.
        if self.device.type != "cpu" and images.numel() * FLOAT_BYTES <= count_free_bytes(self.device) // 8:
            images = images.to(self.device)
        windows = skipped = 0
        for cells in plan.list_strips():
            for slab in blend_slabs(
                self.step, images, plan, cells,
                windows_per_step=self.windows_per_step, device=self.device,
                skips_background=self.predictor.skip_background,
            ):  # fmt: skip
                windows, skipped = windows + slab.num_windows, skipped + slab.num_skipped
                yield slab
        if self.predictor.skip_background:
            logger.info("%d of %d windows have one value and count as background (skip_background)", skipped, windows)

    def _plan(self, image: Tensor, budget: int) -> BlendPlan:
        assert self.window is not None
        shape = pad_shape(image.shape[-3:], self.window)
        plan = plan_blend(
            shape, self.window, self.predictor.overlap, self.step.num_classes, budget,
            windowing=self.predictor.windowing, share=self.share,
        )  # fmt: skip
        if max(plan.strips) > 1:
            logger.warning(
                "a layer of windows with %d classes for %s voxels exceeds the %s available on %s, so the volume is "
                "predicted in %d strips, and windows on their borders are computed twice",
                self.step.num_classes, " x ".join(map(str, shape)), _say(budget), self.device,
                math.prod(plan.strips),
            )  # fmt: skip
        return plan

    def _find_budget(self, image: Tensor) -> int:
        """Return the bytes that the blend may use, in addition to the image and a window's pass."""
        if self.predictor.memory is not None:
            return self.predictor.memory
        free = count_free_bytes(self.device)
        beside = image.numel() * FLOAT_BYTES + self._count_window_bytes(3 * self.step.num_classes + FEATURES)
        return max(free - beside, free // 4)

    def _explain(self, fault: BaseException) -> str:
        assert self.window is not None
        reason = str(fault).partition("\n")[0].rstrip(".")
        return (
            f"{self.windows_per_step} window(s) of {' x '.join(map(str, self.window))} voxels do not fit on "
            f"{self.device}, although {_say(count_free_bytes(self.device))} are free and the blend needs almost "
            f"nothing ({reason}); choose a smaller window, fewer windows per step, or a device with more memory"
        )

    def _count_window_bytes(self, channels: int) -> int:
        assert self.window is not None
        return self.windows_per_step * math.prod(self.window) * channels * FLOAT_BYTES

    def _may_start_again(self) -> bool:
        """Return whether no other process takes part in a pass of the models."""
        return all(
            isinstance(model, nn.Module)
            and not any(
                isinstance(part, ModelParallel) and not isinstance(part, FastKernels) for part in model.modules()
            )
            for model in self.step.models
        )


def pad_shape(sides: Sequence[int], window: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sides of a volume after padding to at least one window."""
    return tuple(sides) if window is None else tuple(map(max, sides, window))


def _stack(images: Sequence[MetaTensor], shape: Sequence[int]) -> Tensor:
    """Return images as a padded batch ``(B, C, D, H, W)``; a single image without padding is not copied."""
    if len(images) == 1 and tuple(images[0].shape[-3:]) == tuple(shape):
        return images[0].as_tensor()[None]
    device = images[0].device  # another image may be on the CPU if memory was short
    return torch.stack(
        [pad(image.as_tensor().to(device), _compute_margins(image.shape[-3:], shape)) for image in images]
    )


def _compute_margins(sides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the padding before and after each side, last axis first, as `torch.nn.functional.pad` needs it."""
    missing = [wanted - side for side, wanted in zip(sides, shape, strict=True)]
    return [part for short in reversed(missing) for part in (short // 2, short - short // 2)]


def count_free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a device, including its cached memory."""
    if device.type != "cuda":
        return available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _say(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
