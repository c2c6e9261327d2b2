"""The preprocessed training cases, kept where patches can be cut out of them at once.

On an accelerator, where they fit, all cases lie in one zero-padded stack, and a batch of patches is one gather by
index tensors: no Python per case and nothing that waits for the host. Otherwise each case stays as it is in main memory
and a patch is a copy of a slice. Both give the same bits.

What lies outside of a case is 0: after normalisation that is the mean of a z-scored image, what nnU-Net pads with, and
what `volseg.models.FitGrid` pads with, so a network sees one kind of outside in training and in prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from volseg.errors import DataError

__all__ = ["MOST_FOREGROUND", "CaseBank", "ForegroundVoxels", "list_voxels", "require_fit"]

MOST_FOREGROUND = 10_000
"""Voxels remembered per case and class for oversampling; nnU-Net's number."""

_SHARE_OF_MEMORY = 0.3
"""Of an accelerator's free memory, what a stack may take by itself; the rest is for training."""


@dataclass(frozen=True, slots=True)
class ForegroundVoxels:
    """Voxels of each foreground class of each case, at most some thousands of them."""

    voxels: Tensor
    """Positions (M, 3), those of one case and class together; in the smallest type that holds them."""
    first: Tensor
    """Row of ``voxels`` where case n's class k + 1 begins, (N, K)."""
    count: Tensor
    """Rows of it, (N, K)."""

    @classmethod
    def find(
        cls, labels: Sequence[Tensor], most: int, seed: int = 0, num_classes: int | None = None
    ) -> "ForegroundVoxels":
        """Collect up to ``most`` voxels per class of each label map (1, D, H, W), drawn where there are more.

        Foreground classes are 1 to ``num_classes`` - 1, or to the largest number in a label map; larger numbers are of
        voxels whose class is not known. What is drawn of a case does not depend on the others.
        """
        return cls.join([cls._find_one(label[0], most, seed, num_classes) for label in labels])

    @classmethod
    def _find_one(cls, label: Tensor, most: int, seed: int, num_classes: int | None) -> "ForegroundVoxels":
        last = int(label.max()) if num_classes is None else num_classes - 1
        generator = torch.Generator().manual_seed(seed)
        voxels = ((label > 0) & (label <= last)).nonzero()
        value = label[voxels.unbind(1)]
        voxels = voxels.to(torch.int16 if max(label.shape) < 2**15 else torch.int32)
        chosen = [voxels[:0]]
        for index in range(last):
            mine = voxels[value == index + 1]
            if len(mine) > most:
                mine = mine[torch.randperm(len(mine), generator=generator)[:most]]
            chosen.append(mine)
        return cls.one(torch.cat(chosen), torch.tensor([[len(mine) for mine in chosen[1:]]], dtype=torch.int64))

    @classmethod
    def one(cls, voxels: Tensor, count: Tensor) -> "ForegroundVoxels":
        """Return those of one case, from its voxels in the order of the classes and their number (1, K)."""
        return cls(voxels, count.cumsum(1) - count, count)

    @classmethod
    def join(cls, cases: Sequence["ForegroundVoxels"]) -> "ForegroundVoxels":
        """Return the voxels of all cases as one."""
        num_classes = max((case.count.shape[1] for case in cases), default=0)
        counts = [pad(case.count, (0, num_classes - case.count.shape[1])) for case in cases]
        count = torch.cat(counts) if counts else torch.zeros(0, 0, dtype=torch.int64)
        first = count.flatten().cumsum(0).view_as(count) - count
        voxels = [case.voxels for case in cases]
        return cls(torch.cat(voxels) if voxels else torch.zeros(0, 3, dtype=torch.int16), first, count)


def list_voxels(
    label: Tensor, most: int, num_classes: int | None = None, *, is_sparse: bool = False
) -> dict[str, ForegroundVoxels]:
    """Return where the classes of a label map lie, ``foreground``, and of a sparse one where any does, ``annotated``.

    See `CaseBank` for the parameters.
    """
    found = {"foreground": ForegroundVoxels.find([label], most, num_classes=num_classes)}
    if is_sparse:
        found["annotated"] = ForegroundVoxels.find([label.ne(num_classes or 0)], most, seed=1, num_classes=2)
    return found


class CaseBank:
    """Hold preprocessed cases and cut boxes out of them.

    Parameters
    ----------
    cases : sequence of mapping
        Each with ``case`` (id), ``image`` (C, D, H, W) and ``label`` (1, D, H, W) on one grid. One that comes from a
        cache has ``voxels`` as well, what `list_voxels` gives; then its voxels are not looked at here, which would read
        them from a disk.
    device : torch.device or str
        Where training happens.
    keep : {"auto", "device", "memory"}
        ``device`` stacks the cases on ``device``; ``memory`` leaves them in main memory; ``auto`` chooses the device
        where it is an accelerator and the stack takes at most 30 % of its free memory.
    image_dtype : torch.dtype
        How images are stored; float16 halves the memory. Boxes are float32 in any case.
    most_foreground : int
        Voxels remembered per case and class for oversampling.
    num_classes : int, optional
        Classes of the labels, background included, where these may hold larger numbers; see `volseg.data.labels`.
    is_sparse : bool
        Whether the number ``num_classes`` stands for voxels that nobody annotated.

    Attributes
    ----------
    names : list of str
        Case ids.
    shapes : Tensor
        D, H, W of each case, (N, 3), on the CPU.
    foreground : ForegroundVoxels
        Where each class lies, on the CPU.
    annotated : ForegroundVoxels or None
        Where voxels are annotated at all, the background too, in place of classes; None where all are.
    on_device : bool
        Whether the cases are stacked on ``device``.

    Raises
    ------
    DataError
        For no cases, or one whose image and label do not fit together or the other cases.
    """

    def __init__(
        self,
        cases: Sequence[Mapping[str, Any]],
        *,
        device: torch.device | str = "cpu",
        keep: Literal["auto", "device", "memory"] = "auto",
        image_dtype: torch.dtype = torch.float32,
        most_foreground: int = MOST_FOREGROUND,
        num_classes: int | None = None,
        is_sparse: bool = False,
    ) -> None:
        if not cases:
            raise DataError("training needs at least one case, got none")
        self.device = torch.device(device)
        self.names = [str(case["case"]) for case in cases]
        images = [_drop_metadata(case["image"]).to(image_dtype) for case in cases]
        labels = [_drop_metadata(case["label"]) for case in cases]
        listed = [case.get("voxels") if most_foreground == MOST_FOREGROUND else None for case in cases]
        for name, image, label, known in zip(self.names, images, labels, listed, strict=True):
            require_fit(name, image, label, images[0].shape[0], values=known is None)
        labels = [label.to(torch.uint8) for label in labels]
        self.num_channels = int(images[0].shape[0])
        self.shapes = torch.tensor([image.shape[1:] for image in images])
        found = [
            list_voxels(label, most_foreground, num_classes, is_sparse=is_sparse) if known is None else known
            for label, known in zip(labels, listed, strict=True)
        ]
        self.foreground = ForegroundVoxels.join([of["foreground"] for of in found])
        self.annotated = ForegroundVoxels.join([of["annotated"] for of in found]) if is_sparse else None
        self.on_device = self._choose(keep, images[0].element_size())
        self._boxes: _Boxes = _Stacked(images, labels, self.device) if self.on_device else _Listed(images, labels)

    def __len__(self) -> int:
        return len(self.names)

    def gather(
        self, cases: Tensor, corners: Tensor, size: Sequence[int], *, pin: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the boxes of ``size`` voxels that begin at ``corners``, 0 where they leave their case.

        Parameters
        ----------
        cases : Tensor
            Index of each box's case, (B,); on ``device`` when the bank is.
        corners : Tensor
            First voxel of each box, (B, 3), which may lie outside of the case; where ``cases`` is.
        size : sequence of int
            D, H, W of every box.
        pin : bool
            Whether boxes from main memory are page-locked, for an asynchronous copy to a GPU.

        Returns
        -------
        tuple of Tensor
            Images (B, C, D, H, W) in float32 and labels (B, 1, D, H, W) in uint8.
        """
        return self._boxes.gather(cases, corners, size, pin)

    @property
    def stack(self) -> tuple[Tensor, Tensor] | None:
        """All images (N, C, D, H, W) and labels (N, 1, D, H, W), 0 beyond each case; None where cases lie in RAM."""
        return self._boxes.stack if isinstance(self._boxes, _Stacked) else None

    def _choose(self, keep: str, bytes_per_value: int) -> bool:
        if keep == "memory" or (keep == "auto" and self.device.type != "cuda"):
            return False
        voxels = len(self) * int((self.shapes.amax(0) + 1).prod())
        needed = voxels * (self.num_channels * bytes_per_value + 1)
        if self.device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(self.device)[0]
        if keep == "device" and needed > free:
            raise DataError(
                f"data.keep is 'device', but {len(self)} cases padded to {tuple((self.shapes.amax(0) + 1).tolist())} "
                f"voxels take {needed / 2**30:.1f} GiB and {self.device} has {free / 2**30:.1f} GiB free; "
                "set data.keep to auto or memory"
            )
        return keep == "device" or needed <= _SHARE_OF_MEMORY * free


class _Boxes(Protocol):
    def gather(self, cases: Tensor, corners: Tensor, size: Sequence[int], pin: bool) -> tuple[Tensor, Tensor]: ...


class _Stacked:
    """All cases in one tensor, each from index 0 on; the last plane of every axis is 0 and stands for outside."""

    def __init__(self, images: Sequence[Tensor], labels: Sequence[Tensor], device: torch.device) -> None:
        longest = [max(image.shape[axis] for image in images) + 1 for axis in (1, 2, 3)]
        shape = (len(images), images[0].shape[0], *longest)
        self._image = torch.zeros(shape, dtype=images[0].dtype, device=device)
        self._label = torch.zeros((shape[0], 1, *longest), dtype=torch.uint8, device=device)
        for stack, volumes in ((self._image, images), (self._label, labels)):
            for row, volume in zip(stack, volumes, strict=True):
                d, h, w = volume.shape[1:]
                row[:, :d, :h, :w] = volume.to(device)

    @property
    def stack(self) -> tuple[Tensor, Tensor]:
        return self._image, self._label

    def gather(
        self,
        cases: Tensor,
        corners: Tensor,
        size: Sequence[int],
        pin: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        index = []
        for axis, side in enumerate(size):
            outside = self._image.shape[axis + 2] - 1
            position = corners[:, axis, None] + torch.arange(side, device=corners.device)
            position = torch.where((position < 0) | (position > outside), outside, position)
            index.append(position.view(-1, *(side if axis == a else 1 for a in range(-1, 3))))
        case = cases.view(-1, 1, 1, 1, 1)
        channel = torch.arange(self._image.shape[1], device=cases.device).view(1, -1, 1, 1, 1)
        return self._image[case, channel, *index].float(), self._label[case, channel[:, :1], *index]


class _Listed:
    """Each case as it is, in main memory."""

    def __init__(self, images: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        self._images, self._labels = images, labels

    def gather(self, cases: Tensor, corners: Tensor, size: Sequence[int], pin: bool) -> tuple[Tensor, Tensor]:
        num_channels = self._images[0].shape[0]
        images = torch.empty(len(cases), num_channels, *size, pin_memory=pin).zero_()
        labels = torch.empty(len(cases), 1, *size, dtype=torch.uint8, pin_memory=pin).zero_()
        for row, (case, corner) in enumerate(zip(cases.tolist(), corners.tolist(), strict=True)):
            _copy_overlap(self._images[case], corner, images[row])
            _copy_overlap(self._labels[case], corner, labels[row])
        return images, labels


def _copy_overlap(volume: Tensor, corner: Sequence[int], box: Tensor) -> None:
    """Copy the part of ``volume`` that lies in the box which begins at ``corner``."""
    within_volume, within_box = [], []
    for first, side, length in zip(corner, box.shape[1:], volume.shape[1:], strict=True):
        begin, end = max(first, 0), min(first + side, length)
        if end <= begin:
            return
        within_volume.append(slice(begin, end))
        within_box.append(slice(begin - first, end - first))
    box[:, *within_box] = volume[:, *within_volume]


def _drop_metadata(volume: Tensor) -> Tensor:
    """Return the values without MONAI's metadata, which every slice would otherwise copy."""
    return volume.as_subclass(Tensor).detach()


def require_fit(name: str, image: Tensor, label: Tensor, num_channels: int, *, values: bool = True) -> None:
    """Raise a DataError that names a case whose volumes cannot be kept in a bank; without ``values``, by shapes."""
    if image.ndim != 4 or label.ndim != 4 or label.shape[0] != 1 or image.shape[1:] != label.shape[1:]:
        raise DataError(
            f"case {name}: need an image (C, D, H, W) and a label (1, D, H, W) on one grid, "
            f"got {tuple(image.shape)} and {tuple(label.shape)}"
        )
    if image.shape[0] != num_channels:
        raise DataError(f"case {name}: has {image.shape[0]} channels, the first case has {num_channels}")
    if not values:
        return
    low, high = label.min(), label.max()
    if low < 0 or high > 255:
        raise DataError(f"case {name}: labels must lie in 0..255, got {low.item():g}..{high.item():g}")
    if label.is_floating_point() and (label != label.round()).any():
        raise DataError(
            f"case {name}: labels must be whole numbers, but its preprocessed label holds others; change the step that "
            "interpolates it"
        )
