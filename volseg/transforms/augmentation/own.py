"""Augmentations of the user's own: applied after the built-in ones, on the device, sample by sample.

One is called as ``augment(image, label, generator)`` with the patch of one sample, image ``(C, D, H, W)`` in float32
and label ``(1, D, H, W)``, and returns both. The generator lies on their device and is seeded anew for each sample of
each batch, so a training that goes on in the middle of an epoch, or on another number of processes, draws what it
would have drawn. Whatever is random must come from it. Why not the whole batch at once: which of its rows a process
makes differs with the number of processes, and a draw for all rows would differ with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.config.registry import Registry
from volseg.errors import ConfigError, GridError

__all__ = ["AUGMENTATIONS", "OwnAugmentations"]

AUGMENTATIONS = Registry("augmentation", group="volseg.augmentations")
"""What ``augmentation.own`` in a config may name; the built-in ones have sections of their own."""


class OwnAugmentations:
    """Apply the augmentations that a config lists, one after the other.

    Parameters
    ----------
    specs : sequence of mapping
        Name and parameters of each, as `AUGMENTATIONS` takes them.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a component that makes nothing that can be called.
    """

    def __init__(self, specs: Sequence[Mapping[str, Any]]) -> None:
        self.names = [spec["name"] for spec in specs]
        self.steps: list[Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]] = []
        for spec in specs:
            step = AUGMENTATIONS.build(spec)
            if not callable(step):
                raise ConfigError(
                    f"augmentation {spec['name']} must make a callable (image, label, generator) -> (image, label), "
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
            For a step that gives other shapes, types or devices than it got.
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


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
