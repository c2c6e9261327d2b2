"""Windows blended layer by layer: of all classes, only the planes that a window may still reach are held.

::

    planes of the streamed axis ->
    |  decided, forgotten  | last one | layer of windows being added        |  not yet begun
                           |<------- held, as a ring: plane i at i % depth ->|
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from volseg.device.triton_tiles import takes
from volseg.inference import triton_blending
from volseg.inference.memory_plan import BlendPlan, Region
from volseg.inference.window_step import WindowStep
from volseg.inference.windows import Layer

__all__ = ["Slab", "add_window", "blend_slabs", "locate_planes"]


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Planes of a blend that no window will touch any more, until the next slab is asked for."""

    blend: Tensor
    """Probabilities ``(B, K, d, h, w)`` float32, of which the ready planes and the one after them are finished."""
    origin: tuple[int, int, int]
    """Voxel i of an axis lies at index ``(i - origin) % side``."""
    layer: Layer
    num_windows: int
    """That were blended since the slab before."""
    num_skipped: int
    """Of these, windows of background that went through no model."""


def blend_slabs(
    step: WindowStep,
    images: Tensor,
    plan: BlendPlan,
    region: Region,
    *,
    windows_per_step: int,
    device: torch.device,
    stitch_on: torch.device,
    skips_background: bool = False,
) -> Iterator[Slab]:
    """Yield a region of the probabilities of images slab by slab; the buffer is one and the same.

    Parameters
    ----------
    step : WindowStep
        What a batch of windows goes through.
    images : Tensor
        ``(B, C, D, H, W)`` of the plan's shape, anywhere.
    plan, region
        What is held, and which strip of the volume this is.
    windows_per_step : int
        Windows that go through the models at once.
    device, stitch_on : torch.device
        Where windows are computed, and where they are blended.
    skips_background : bool
        Whether a window in which the image has one value counts as background for certain: probability 1 of the first
        class, or 0 of every region. Of probabilities only.
    """
    sides = [plan.depth if axis == plan.axis else len(part) for axis, part in enumerate(region.held)]
    d, h, w = (0 if axis == plan.axis else part.start for axis, part in enumerate(region.held))
    origin = d, h, w
    importance = plan.windowing.importance(plan.window, stitch_on)
    blend = torch.empty(len(images), step.num_classes, *sides, device=stitch_on)
    weights = torch.empty(1, *sides, device=stitch_on)
    by_pass = takes(blend) and device == stitch_on
    share = importance / step.num_passes if by_pass else importance
    for layer in plan.layers:
        for planes in locate_planes(layer.fresh, plan.depth):
            _narrow(blend, plan.axis, planes).zero_()
            _narrow(weights, plan.axis, planes).zero_()
        corners = plan.corners(region.held, layer)
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
                for (index, _), at, output in zip(together, ats, outputs.to(stitch_on), strict=True):
                    add_window(blend[index], output, share, at, plan.axis, link, flips)
            for (index, _), at in zip(together, ats, strict=True):
                if index == 0:
                    add_window(weights, torch.ones_like(importance)[None], importance, at, plan.axis)
        for planes in locate_planes(layer.finished, plan.depth):
            _narrow(blend, plan.axis, planes).div_(_narrow(weights, plan.axis, planes))
        yield Slab(blend, origin, layer, len(places), len(empty))


def add_window(
    blend: Tensor,
    window: Tensor,
    importance: Tensor,
    first: Sequence[int],
    axis: int,
    link: str = "",
    flips: Sequence[int] = (),
) -> None:
    """Add a window, each voxel times its importance, to a blend.

    Parameters
    ----------
    blend : Tensor
        ``(K, D, H, W)``, a ring along ``axis``.
    window : Tensor
        Probabilities ``(K, d, h, w)``, which this may overwrite, or logits.
    importance : Tensor
        ``(d, h, w)``.
    first : sequence of int
        Where in the blend the window begins. What lies beside the blend is left out, except along the ring.
    axis : int
        The ring's.
    link : str
        ``softmax`` or ``sigmoid``, if the window holds logits.
    flips : sequence of int
        Dims along which the window is mirrored: -3, -2, -1.
    """
    if takes(blend):
        triton_blending.add_window(blend, window, importance, first, axis, link, flips)
        return
    window = LINKS[link](window.flip(tuple(flips)) if flips else window).mul_(importance)
    spans = [
        _overlap(at, wide, side, ring=dim == axis)
        for dim, (at, wide, side) in enumerate(zip(first, importance.shape, blend.shape[1:], strict=True))
    ]
    for d, h, w in product(*spans):
        blend[:, d[0], h[0], w[0]].add_(window[:, d[1], h[1], w[1]])


LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda probabilities: probabilities,
    "softmax": lambda logits: logits.float().softmax(0),
    "sigmoid": lambda logits: logits.float().sigmoid(),
}


def _run(step: WindowStep, windows: Tensor, by_pass: bool) -> Iterator[tuple[Tensor, str, list[int]]]:
    """Yield what is to be added for a batch of windows, with its link and mirrored dims.

    Where one kernel does the rest, each pass's logits, so that no probabilities of a whole window exist, which for many
    classes take more than the network; else the mean over the passes.
    """
    if by_pass:
        for logits, flips in step.passes(windows):
            yield logits, step.link, flips
    else:
        yield step(windows), "", []


def _find_empty(
    images: Tensor, places: Sequence[tuple[int, tuple[int, ...]]], window: Sequence[int]
) -> set[tuple[int, tuple[int, ...]]]:
    """Return the places of windows in which each channel has one value: once per layer a GPU is waited for."""
    if not places:
        return set()
    cut = (_cut(images[index], corner, window).flatten(1) for index, corner in places)
    flat = torch.stack([(voxels.amin(1) == voxels.amax(1)).all() for voxels in cut])
    return {place for place, is_flat in zip(places, flat.tolist(), strict=True) if is_flat}


def _cut(image: Tensor, corner: Sequence[int], sides: Sequence[int]) -> Tensor:
    d, h, w = (slice(first, first + side) for first, side in zip(corner, sides, strict=True))
    return image[:, d, h, w]


def _overlap(first: int, wide: int, side: int, *, ring: bool) -> list[tuple[slice, slice]]:
    """Return which indices of the blend are which of the window, in one piece or two."""
    if not ring:
        start, stop = max(0, first), min(side, first + wide)
        return [(slice(start, stop), slice(start - first, stop - first))]
    done, pieces = 0, []
    for planes in locate_planes(range(first, first + wide), side):
        pieces.append((planes, slice(done, done + planes.stop - planes.start)))
        done += planes.stop - planes.start
    return pieces


def locate_planes(planes: range, depth: int) -> list[slice]:
    """Return where planes lie in a ring of ``depth``: in one piece, or in two around its end."""
    if not planes:
        return []
    start = planes.start % depth
    stop = start + len(planes)
    return [slice(start, stop)] if stop <= depth else [slice(start, depth), slice(0, stop - depth)]


def _narrow(volumes: Tensor, axis: int, planes: slice) -> Tensor:
    return volumes.narrow(volumes.ndim - 3 + axis, planes.start, planes.stop - planes.start)
