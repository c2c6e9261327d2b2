"""Apply custom augmentations after the built-in ones, on the device, sample by sample.

An augmentation is called as ``augment(image, label, generator)`` with the patch of one sample, image ``(C, D, H, W)``
in float32 and label ``(1, D, H, W)``, and returns both. The generator is on their device and is seeded for each sample
of each batch. So a training that resumes within an epoch, or on another number of processes, draws the same numbers.
All randomness must come from this generator. Augmentations are not called for the whole batch, since the rows of a
process, and so its draws, depend on the number of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from volseg.config.registry import Registry
from volseg.errors import ConfigError, GridError

AUGMENTATIONS = Registry("augmentation")
"""Augmentations that ``augmentation.own`` in a config may name; built-in ones have their own sections."""


class OwnAugmentations:
    """Apply the custom augmentations of a config, one after the other.

    Parameters
    ----------
    specs : sequence of mapping
        Name and parameters of each, for `AUGMENTATIONS`.
    num_masks : int
        Number of last channels that are masks of a previous stage; `ChangedMasks` changes them first.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a component whose result cannot be called.
    """

    def __init__(self, specs: Sequence[Mapping[str, Any]], num_masks: int = 0) -> None:
        self.names = [*(["of the previous stage"] if num_masks else []), *(spec["name"] for spec in specs)]
        self.steps: list[Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]] = []
        if num_masks:
            self.steps.append(ChangedMasks(num_masks))
        for spec in specs:
            step = AUGMENTATIONS.build(spec)
            if not callable(step):
                raise ConfigError(
                    f"augmentation {spec['name']} must build a callable (image, label, generator) -> (image, label), "
                    f"got a {type(step).__name__}"
                )
            self.steps.append(step)

    def __bool__(self) -> bool:
        return bool(self.steps)

    @torch.no_grad()
    def apply(self, image: Tensor, label: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the changed patch of one sample.

        Parameters
        ----------
        image, label : Tensor
            ``(C, D, H, W)`` and ``(1, D, H, W)``.
        generator : torch.Generator
            On their device, seeded for this sample.

        Raises
        ------
        GridError
            If a step changes shapes, types or devices.
        """
        for name, step in zip(self.names, self.steps, strict=True):
            changed = step(image, label, generator)
            if not isinstance(changed, tuple | list) or len(changed) != 2:
                raise GridError(f"augmentation {name} must return (image, label), got {_describe(changed)}")
            for field, before, after in (("image", image, changed[0]), ("label", label, changed[1])):
                if _describe(after) != _describe(before):
                    raise GridError(
                        f"augmentation {name} must return the {field} with the shape, type and device that it got, "
                        f"{_describe(before)}, got {_describe(after)}"
                    )
            image, label = changed
        return image, label


class ChangedMasks:
    """Change the masks of a previous stage as nnU-Net does, so that the network does not trust their borders.

    In 40 % of the samples, each mask is dilated, eroded, closed or opened by a ball of 1 to 8 voxels with a probability
    of one half; a voxel that joins a mask leaves the others. In 20 % of the samples, a connected part of each mask that
    fills less than 15 % of the patch is removed, with a probability of one half. Differs from nnU-Net: radii are whole
    numbers.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, image: Tensor, label: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the image with changed masks, and the unchanged label."""
        masks = image[-self.count :] > 0.5
        (reshapes, removes, *_), *lots = torch.rand(
            1 + self.count, 5, generator=generator, device=image.device
        ).tolist()
        order = torch.randperm(self.count, generator=generator, device=image.device).tolist()
        for number, (is_reshaped, kind, size, is_cut, part) in zip(order, lots, strict=True):
            if reshapes < 0.4 and is_reshaped < 0.5:
                masks = _reshape(masks, number, int(4 * kind), 1 + int(8 * size))
            if removes < 0.2 and is_cut < 0.5:
                masks[number] = _remove_part(masks[number], part)
        return torch.cat([image[: -self.count], masks.to(image.dtype)]), label


def _reshape(masks: Tensor, number: int, kind: int, radius: int) -> Tensor:
    """Dilate (0), erode (1), close (2) or open (3) one mask; remove its new voxels from the other masks."""
    changed = masks[number]
    for grows in ((True,), (False,), (True, False), (False, True))[kind]:
        changed = _dilate(changed, radius) if grows else ~_dilate(~changed, radius)
    masks = masks & ~(changed & ~masks[number])
    masks[number] = changed
    return masks


def _dilate(mask: Tensor, radius: int) -> Tensor:
    """Return the voxels within ``radius`` of a mask, by a convolution in Fourier space."""
    squares = torch.arange(-radius, radius + 1, device=mask.device) ** 2
    ball = squares[:, None, None] + squares[:, None] + squares <= radius**2
    sides = [side + 2 * radius for side in mask.shape]
    product = torch.fft.rfftn(mask.float(), s=sides) * torch.fft.rfftn(ball.float(), s=sides)
    inner = tuple(slice(radius, radius + side) for side in mask.shape)
    return torch.fft.irfftn(product, s=sides)[inner] > 0.5


def _remove_part(mask: Tensor, lot: float) -> Tensor:
    """Return a mask without one of its small connected parts, chosen by ``lot`` in [0, 1)."""
    parts, _ = ndimage.label(mask.cpu().numpy(), np.ones((3, 3, 3)))
    small = np.flatnonzero(np.bincount(parts.ravel())[1:] < 0.15 * mask.numel()) + 1
    if not len(small):
        return mask
    return mask & torch.from_numpy(parts != small[int(lot * len(small))]).to(mask.device)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
