"""Blend windows layer by layer: for all classes, memory is needed only for the planes that a window may still reach.

::

    planes of the streamed axis ->
    |  decided, forgotten  | last one | layer of windows being added        |  not yet begun
                           |<------- held, as a ring: plane i at i % depth ->|
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from volseg.device.triton_tiles import takes
from volseg.inference import triton_prediction
from volseg.inference.sampling import Box, locate_planes
from volseg.inference.window_step import LINKS, WindowStep
from volseg.inference.windows import BlendPlan


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Planes of a blend that no later window touches; valid until the next slab is requested."""

    blend: Tensor
    """Probabilities ``(B, K, d, h, w)`` float32; the ready planes and the plane after them are finished."""
    origin: tuple[int, int, int]
    """Voxel i of an axis is at index ``(i - origin) % side``."""
    finished: Box
    """Voxels that are finished since the previous slab."""
    ready: Box
    """Voxels whose labels can be decided now, because the next plane is finished too."""
    num_windows: int
    """Number of windows that were blended since the previous slab."""
    num_skipped: int
    """Number of those windows that were background and skipped the model."""


def blend_slabs(
    step: WindowStep,
    images: Tensor,
    plan: BlendPlan,
    cells: Box,
    *,
    windows_per_step: int,
    device: torch.device,
    skips_background: bool = False,
) -> Iterator[Slab]:
    """Yield a strip of the images' probabilities slab by slab; all slabs share one buffer.

    Parameters
    ----------
    step : WindowStep
        Applies the models to a batch of windows.
    images : Tensor
        ``(B, C, D, H, W)`` of the plan's shape, on any device.
    plan, cells
        The plan of held planes, and one of its strips.
    windows_per_step : int
        Windows per pass through the models.
    device : torch.device
        Device of the models and of the blend.
    skips_background : bool
        Whether a window in which the image has only one value counts as certain background: probability 1 of the first
        class, or 0 of every region. Only for probabilities.
    """
    held = plan.hold(cells)
    sides = [plan.depth if axis == plan.axis else len(part) for axis, part in enumerate(held)]
    d, h, w = (0 if axis == plan.axis else part.start for axis, part in enumerate(held))
    origin = d, h, w
    importance = plan.windowing.importance(plan.window, device)
    blend = torch.empty(len(images), step.num_classes, *sides, device=device)
    weights = torch.empty(1, *sides, device=device)
    by_pass = takes(blend)
    share = importance / step.num_passes if by_pass else importance
    for layer in plan.layers:
        for planes in locate_planes(layer.fresh, plan.depth):
            _narrow(blend, plan.axis, planes).zero_()
            _narrow(weights, plan.axis, planes).zero_()
        corners = plan.corners(held, layer)
        places = [(index, corner) for index in range(len(images)) for corner in corners]
        empty = _find_empty(images, places, plan.window) if skips_background else set()
        for index, corner in sorted(empty):
            at = [place - start for place, start in zip(corner, origin, strict=True)]
            ones = torch.ones_like(importance)[None]
            if not step.regions:
                add_window(blend[index, :1], ones.clone(), importance, at, plan.axis)
            if index == 0:
                add_window(weights, ones, importance, at, plan.axis)
        computed = [place for place in places if place not in empty]
        for first in range(0, len(computed), windows_per_step):
            together = computed[first : first + windows_per_step]
            cut = [_cut(images[index], corner, plan.window) for index, corner in together]
            ats = [[place - start for place, start in zip(corner, origin, strict=True)] for _, corner in together]
            for outputs, link, flips in _run(step, torch.stack(cut).to(device, torch.float32), by_pass):
                for (index, _), at, output in zip(together, ats, outputs.to(device), strict=True):
                    add_window(blend[index], output, share, at, plan.axis, link, flips)
            for (index, _), at in zip(together, ats, strict=True):
                if index == 0:
                    add_window(weights, torch.ones_like(importance)[None], importance, at, plan.axis)
        for planes in locate_planes(layer.finished, plan.depth):
            _narrow(blend, plan.axis, planes).div_(_narrow(weights, plan.axis, planes))
        finished, ready = (plan.restrict(cells, planes) for planes in (layer.finished, layer.ready))
        yield Slab(blend, origin, finished, ready, len(places), len(empty))


def add_window(
    blend: Tensor,
    window: Tensor,
    importance: Tensor,
    first: Sequence[int],
    axis: int,
    link: str = "",
    flips: Sequence[int] = (),
) -> None:
    """Add a window to a blend, with each voxel multiplied by its importance.

    Parameters
    ----------
    blend : Tensor
        ``(K, D, H, W)``, a ring along ``axis``.
    window : Tensor
        Probabilities ``(K, d, h, w)``, which the call may overwrite, or logits.
    importance : Tensor
        ``(d, h, w)``.
    first : sequence of int
        First voxel of the window in the blend. Voxels outside the blend are left out, except along the ring.
    axis : int
        Axis of the ring.
    link : str
        ``softmax`` or ``sigmoid``, if the window contains logits.
    flips : sequence of int
        Dims along which the window is mirrored: -3, -2, -1.
    """
    if takes(blend):
        triton_prediction.add_window(blend, window, importance, first, axis, link, flips)
        return
    window = LINKS[link](window.flip(tuple(flips)) if flips else window, 0).mul_(importance)
    spans = [
        _overlap(at, wide, side, ring=dim == axis)
        for dim, (at, wide, side) in enumerate(zip(first, importance.shape, blend.shape[1:], strict=True))
    ]
    for d, h, w in product(*spans):
        blend[:, d[0], h[0], w[0]].add_(window[:, d[1], h[1], w[1]])


def _run(step: WindowStep, windows: Tensor, by_pass: bool) -> Iterator[tuple[Tensor, str, list[int]]]:
    """Yield the addends of a batch of windows, each with its link and mirrored dims.

    With the fused kernel, yield the logits of each pass: the probabilities of a whole window, which for many classes
    need more memory than the network, never exist. Otherwise yield the mean over the passes.
    """
    if by_pass:
        for logits, flips in step.passes(windows):
            yield logits, step.link, flips
    else:
        yield step(windows), "", []


def _find_empty(
    images: Tensor, places: Sequence[tuple[int, tuple[int, ...]]], window: Sequence[int]
) -> set[tuple[int, tuple[int, ...]]]:
    """Return the places of windows in which each channel has one value; the call waits for the GPU once per layer."""
    if not places:
        return set()
    cut = (_cut(images[index], corner, window).flatten(1) for index, corner in places)
    flat = torch.stack([(voxels.amin(1) == voxels.amax(1)).all() for voxels in cut])
    return {place for place, is_flat in zip(places, flat.tolist(), strict=True) if is_flat}


def _cut(image: Tensor, corner: Sequence[int], sides: Sequence[int]) -> Tensor:
    d, h, w = (slice(first, first + side) for first, side in zip(corner, sides, strict=True))
    return image[:, d, h, w]


def _overlap(first: int, wide: int, side: int, *, ring: bool) -> list[tuple[slice, slice]]:
    """Return matching slices of the blend and of the window, in one piece or two."""
    if not ring:
        start, stop = max(0, first), min(side, first + wide)
        return [(slice(start, stop), slice(start - first, stop - first))]
    done, pieces = 0, []
    for planes in locate_planes(range(first, first + wide), side):
        pieces.append((planes, slice(done, done + planes.stop - planes.start)))
        done += planes.stop - planes.start
    return pieces


def _narrow(volumes: Tensor, axis: int, planes: slice) -> Tensor:
    return volumes.narrow(volumes.ndim - 3 + axis, planes.start, planes.stop - planes.start)
