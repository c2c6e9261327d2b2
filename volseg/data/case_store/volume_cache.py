"""Store the preprocessed training cases so that patches are cut quickly.

As many cases as fit are on the accelerator, one after the other without padding. Index tensors select the patches of a
batch there, without Python per case or a wait for the host. The other cases stay in main memory or in mapped files.
Their patches are fetched: cut into boxes on the host, and copied to the device. Both ways give the same bits.

Outside a case the value is 0. After normalisation 0 is the mean of a z-scored image, and the padding of nnU-Net and of
`FitGrid`, so a network sees the same values there in training and in prediction.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from volseg.data.case_store.preprocessed import StoredCase
from volseg.errors import DataError
from volseg.transforms.augmentation.triton_reading import PatchSources

MOST_FOREGROUND = 10_000
"""Most voxels stored per case and class for oversampling; nnU-Net's number."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForegroundVoxels:
    """Voxels of each foreground class of each case, at most some thousands."""

    voxels: Tensor
    """Positions (M, 3), sorted by case and class; in the smallest sufficient type."""
    count: Tensor
    """Number of the rows of case n's class k + 1 in ``voxels``, (N, K)."""

    @property
    def first(self) -> Tensor:
        """First of these rows, (N, K)."""
        return self.count.flatten().cumsum(0).view_as(self.count) - self.count

    @classmethod
    def find(
        cls, labels: Sequence[Tensor], most: int, seed: int = 0, num_classes: int | None = None
    ) -> "ForegroundVoxels":
        """Collect up to ``most`` voxels per class of each label map (1, D, H, W), drawn if there are more.

        Foreground classes are 1 to ``num_classes`` - 1, or to the largest number in a label map; larger numbers mean
        voxels of unknown class. The draw for a case does not depend on the others.
        """
        return cls.join([cls._draw_one(label[0], most, seed, num_classes) for label in labels])

    @classmethod
    def _draw_one(cls, label: Tensor, most: int, seed: int, num_classes: int | None) -> "ForegroundVoxels":
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
        return cls(torch.cat(chosen), torch.tensor([[len(mine) for mine in chosen[1:]]], dtype=torch.int64))

    @classmethod
    def join(cls, cases: Sequence["ForegroundVoxels"]) -> "ForegroundVoxels":
        """Return the voxels of all cases as one."""
        num_classes = max(case.count.shape[1] for case in cases)
        counts = [pad(case.count, (0, num_classes - case.count.shape[1])) for case in cases]
        return cls(torch.cat([case.voxels for case in cases]), torch.cat(counts))


def list_voxels(
    label: Tensor, num_classes: int | None = None, *, is_sparse: bool = False
) -> dict[str, ForegroundVoxels]:
    """Return the places of a label map's classes, ``foreground``, and of a sparse map's labels, ``annotated``.

    See `VolumeCache` for the parameters.
    """
    found = {"foreground": ForegroundVoxels.find([label], MOST_FOREGROUND, num_classes=num_classes)}
    if is_sparse:
        found["annotated"] = ForegroundVoxels.find([label.ne(num_classes or 0)], MOST_FOREGROUND, seed=1, num_classes=2)
    return found


class VolumeCache:
    """Store of preprocessed cases, which cuts patches out of them.

    Parameters
    ----------
    cases : sequence of mapping
        Each with ``case`` (id), ``image`` (C, D, H, W) and ``label`` (1, D, H, W) on one grid. A case from a cache also
        has ``voxels``, the result of `list_voxels`, so that its voxels are not read from the disk here; and ``mapped``,
        a `StoredCase`. The default ``weight`` is 1.
    device : torch.device or str
        Device of the training.
    keep : {"auto", "device", "memory"}
        ``device`` puts all cases on ``device``; ``memory`` leaves them in main memory; ``auto`` puts on
        the device the smallest cases, up to ``budget_bytes``.
    budget_bytes : int, optional
        Bytes that ``auto`` may use on the device, at most the free memory; by default 30 % of the free memory on a
        GPU, and nothing on a CPU.
    num_classes : int, optional
        Classes of the labels, background included, if the labels may contain larger numbers; see `volseg.data.labels`.
    is_sparse : bool
        Whether the number ``num_classes`` means voxels without annotation.

    Attributes
    ----------
    names : list of str
        Case ids.
    shapes : Tensor
        D, H, W of each case, (N, 3), on the CPU.
    foreground : ForegroundVoxels
        Voxels of each class, on the CPU.
    annotated : ForegroundVoxels or None
        Annotated voxels, including the background, in place of classes; None if all voxels are annotated.
    weights : Tensor or None
        How often each case is drawn, (N,) in float64; None if all are drawn equally often.
    is_resident : Tensor
        Whether each case is on ``device``, (N,) bool, on the CPU.
    num_on_device : int
        Number of cases on ``device``.
    stored : tuple of Tensor
        Images and labels of these cases; see `PatchSources`.

    Raises
    ------
    DataError
        If there are no cases, or the image and label of a case do not fit each other or the other cases.
    """

    def __init__(
        self,
        cases: Sequence[Mapping[str, Any]],
        *,
        device: torch.device | str = "cpu",
        keep: Literal["auto", "device", "memory"] = "auto",
        budget_bytes: int | None = None,
        num_classes: int | None = None,
        is_sparse: bool = False,
    ) -> None:
        if not cases:
            raise DataError("training needs at least one case, got none")
        self.device = torch.device(device)
        self.names = [str(case["case"]) for case in cases]
        images = [_drop_metadata(case["image"]).float() for case in cases]
        labels = [_drop_metadata(case["label"]) for case in cases]
        listed = [case.get("voxels") for case in cases]
        for name, image, label, known in zip(self.names, images, labels, listed, strict=True):
            require_fit(name, image, label, images[0].shape[0], values=known is None)
        labels = [label.to(torch.uint8) for label in labels]
        weights = [float(case.get("weight", 1.0)) for case in cases]
        self.weights = torch.tensor(weights, dtype=torch.float64) if len(set(weights)) > 1 else None
        self.num_channels = int(images[0].shape[0])
        self.shapes = torch.tensor([image.shape[1:] for image in images])
        found = [
            list_voxels(label, num_classes, is_sparse=is_sparse) if known is None else known
            for label, known in zip(labels, listed, strict=True)
        ]
        self.foreground = ForegroundVoxels.join([of["foreground"] for of in found])
        self.annotated = ForegroundVoxels.join([of["annotated"] for of in found]) if is_sparse else None
        self._place(images, labels, keep, budget_bytes)
        mapped: list[StoredCase | None] = [case.get("mapped") for case in cases]
        for stored in filter(None, mapped):  # checked once for cases that were copied to the device
            stored.require_unchanged()
        self._mapped = [
            None if lies_there else stored for stored, lies_there in zip(mapped, self.is_resident, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def on_device(self) -> bool:
        """Whether all cases are on ``device``."""
        return self.num_on_device == len(self)

    def require_files(self) -> None:
        """Check that the files of mapped cases are unchanged.

        Raises
        ------
        DataError
            If a file was overwritten or truncated: reading beyond its end would kill the process silently (SIGBUS).
        """
        for stored in filter(None, self._mapped):
            stored.require_unchanged()

    def locate(self, cases: Tensor, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of patches of ``size`` voxels: begins, shapes and corners, as for `PatchSources`.

        Parameters
        ----------
        cases : Tensor
            Index of each patch's case, (..., B), on the CPU.
        corners : Tensor
            First voxel of each patch in its case, (..., B, 3), which may be outside.
        size : sequence of int
            D, H, W of every patch.

        Returns
        -------
        tuple of Tensor
            Tensors on the CPU. For the patches that `fetch` returns for a batch (the last dim of ``cases``), patch s is
            box s.
        """
        there = self.is_resident[cases]
        box = (~there).cumsum(-1) - 1
        begins = torch.where(there, self._begins[cases], -1 - box)
        shapes = torch.where(there[..., None], self.shapes[cases], torch.tensor(size))
        return begins, shapes, torch.where(there[..., None], corners, 0)

    def fetch(self, cases: Tensor, corners: Tensor, size: Sequence[int], *, pin: bool = False) -> tuple[Tensor, Tensor]:
        """Return the patches of the cases that are not on the device, as boxes on the host.

        Parameters
        ----------
        cases, corners, size
            Those of a batch; see `locate`. Patches of cases on the device are skipped.
        pin : bool
            Whether boxes are page-locked, for an asynchronous copy to a GPU.

        Returns
        -------
        tuple of Tensor
            Images (S, C, *size) in their stored type and labels (S, 1, *size) in uint8.

        Raises
        ------
        DataError
            If the file of a mapped case was overwritten or truncated: its voxels are not used.
        """
        away = ~self.is_resident[cases]
        images, labels = self.make_boxes(int(away.sum()), size, pin=pin)
        for row, (case, corner) in enumerate(zip(cases[away].tolist(), corners[away].tolist(), strict=True)):
            for volumes, boxes in ((self._images, images), (self._labels, labels)):
                volume = volumes[case]
                assert volume is not None
                _copy_overlap(volume, corner, boxes[row])
            if (stored := self._mapped[case]) is not None:
                stored.require_unchanged()
        return images, labels

    def make_boxes(
        self, count: int, size: Sequence[int], *, device: torch.device | str = "cpu", pin: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return zeroed boxes for the images and labels of ``count`` fetched patches."""
        images, labels = (
            torch.empty(count, channels, *size, dtype=stored.dtype, device=device, pin_memory=pin and count > 0).zero_()
            for channels, stored in zip((self.num_channels, 1), self.stored, strict=True)
        )
        return images, labels

    def gather(self, cases: Tensor, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return patches of any cases: images (B, C, *size) in float32, labels (B, 1, *size) in uint8.

        They are on ``device``; see `locate` for the parameters.
        """
        boxes = self.fetch(cases, corners, size)
        return self.join(boxes, self.locate(cases, corners, size), size)

    def join(
        self, boxes: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor, Tensor], size: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the patches of a batch, from fetched boxes and from the device; see `gather`.

        The ``places`` are the result of `locate`, on any device; on ``device`` they need no copy.
        """
        image, label = (box.to(self.device, non_blocking=True) for box in boxes)
        if not self.num_on_device:
            return image.float(), label
        begins, shapes, corners = (where.to(self.device) for where in places)
        return PatchSources(self.stored, (image, label), begins, shapes, corners).cut(size)

    def _place(self, images: Sequence[Tensor], labels: Sequence[Tensor], keep: str, budget_bytes: int | None) -> None:
        """Copy the chosen cases to the device, keep the rest in place, and log their numbers."""
        sizes = self.shapes.prod(1) * (self.num_channels * images[0].element_size() + 1)
        self.is_resident = torch.tensor(self._choose(keep, budget_bytes, sizes.tolist()))
        self.num_on_device = int(self.is_resident.sum())
        stored_voxels = torch.where(self.is_resident, self.shapes.prod(1), 0)
        self._begins = stored_voxels.cumsum(0) - stored_voxels
        self.stored = self._store(images), self._store(labels)
        self._images, self._labels = (
            [None if lies_there else volume for volume, lies_there in zip(of, self.is_resident, strict=True)]
            for of in (images, labels)
        )
        if self.device.type != "cpu" or self.num_on_device:
            kept = f"{int(sizes[self.is_resident].sum()) / 2**30:.2g} of {int(sizes.sum()) / 2**30:.2g} GiB"
            logger.info("%d of %d training cases are on %s (%s)", self.num_on_device, len(self), self.device, kept)

    def _store(self, volumes: Sequence[Tensor]) -> Tensor:
        """Return the volumes of the cases on the device, one after the other."""
        there = [volume for volume, is_there in zip(volumes, self.is_resident, strict=True) if is_there]
        stored = torch.empty(sum(volume.numel() for volume in there), dtype=volumes[0].dtype, device=self.device)
        end = 0
        for volume in there:
            begin, end = end, end + volume.numel()
            stored[begin:end].view(volume.shape).copy_(volume)
        return stored

    def _choose(self, keep: str, budget_bytes: int | None, sizes: Sequence[int]) -> list[bool]:
        """Return whether each case goes to the device."""
        if self.device.type != "cuda":
            budget = budget_bytes or 0
            return [True] * len(self) if keep == "device" else choose_resident(sizes, budget if keep == "auto" else 0)
        free = torch.cuda.mem_get_info(self.device)[0]
        if keep == "device" and sum(sizes) > free:
            raise DataError(
                f"data.keep is 'device', but the {len(self)} cases take {sum(sizes) / 2**30:.1f} GiB and {self.device} "
                f"has {free / 2**30:.1f} GiB free; set data.keep to memory, or to auto, which puts there what fits"
            )
        budgets = {"auto": choose_budget(free, budget_bytes), "device": free, "memory": 0}
        return choose_resident(sizes, budgets[keep])


def _copy_overlap(volume: Tensor, corner: Sequence[int], box: Tensor) -> None:
    """Copy the part of ``volume`` in the box that begins at ``corner``."""
    within_volume, within_box = [], []
    for first, side, length in zip(corner, box.shape[1:], volume.shape[1:], strict=True):
        begin, end = max(first, 0), min(first + side, length)
        if end <= begin:
            return
        within_volume.append(slice(begin, end))
        within_box.append(slice(begin - first, end - first))
    box[:, *within_box] = volume[:, *within_volume]


def _drop_metadata(volume: Tensor) -> Tensor:
    """Return the values without MONAI's metadata, which every slice would copy."""
    return volume.as_subclass(Tensor).detach()


def require_fit(name: str, image: Tensor, label: Tensor, num_channels: int, *, values: bool = True) -> None:
    """Raise a DataError with the case's name if its volumes do not fit a cache; ``values=False`` checks only shapes."""
    if image.ndim != 4 or label.ndim != 4 or label.shape[0] != 1 or image.shape[1:] != label.shape[1:]:
        raise DataError(
            f"case {name}: need an image (C, D, H, W) and a label (1, D, H, W) on one grid, "
            f"got {tuple(image.shape)} and {tuple(label.shape)}"
        )
    if image.shape[0] != num_channels:
        raise DataError(f"case {name} has {image.shape[0]} channels, but the first case has {num_channels}")
    if not values:
        return
    if not all(math.isfinite(end) for end in map(float, image.aminmax())):
        raise DataError(
            f"case {name}: its preprocessed image contains NaN or infinite values ({image.dtype}); check its file with "
            "`volseg data check` (values beyond 1e18 overflow when they are normalised), or the preprocessing"
        )
    low, high = label.min(), label.max()
    if low < 0 or high > 255:
        raise DataError(f"case {name}: labels must be in 0..255, got {low.item():g}..{high.item():g}")
    if label.is_floating_point() and (label != label.round()).any():
        raise DataError(
            f"case {name}: labels must be whole numbers, but its preprocessed label contains fractions; change the "
            "step that interpolates it"
        )


SHARE_OF_MEMORY = 0.3
"""Share of a device's free memory for cases; the rest is for training."""


def choose_budget(free_bytes: int, limit_bytes: int | None = None) -> int:
    """Return how many of the ``free_bytes`` of a device cases may use; a limit replaces the default share.

    >>> choose_budget(100), choose_budget(100, limit_bytes=80), choose_budget(100, limit_bytes=120)
    (30, 80, 100)
    """
    return int(SHARE_OF_MEMORY * free_bytes) if limit_bytes is None else min(limit_bytes, free_bytes)


def choose_resident(sizes_bytes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Choose as many cases as the budget holds: the smallest, of equal ones the first.

    If all cases are drawn equally often, only the number of resident cases decides how many patches are fetched.

    >>> choose_resident([40, 10, 30, 10], budget_bytes=50)
    [False, True, True, True]
    """
    chosen, left = [False] * len(sizes_bytes), budget_bytes
    for index in sorted(range(len(sizes_bytes)), key=lambda index: sizes_bytes[index]):
        if sizes_bytes[index] > left:
            break
        chosen[index], left = True, left - sizes_bytes[index]
    return chosen
