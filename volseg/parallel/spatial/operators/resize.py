"""Interpolation: nearest, nearest-exact and the linear family, with either ``align_corners``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device import fusions, upsample2x
from volseg.device.first_order import LinearMap
from volseg.device.layout import DIM
from volseg.parallel.spatial.gathered import cut_if_thick, say_gathered
from volseg.parallel.spatial.operators.operands import each_sample, per_dim, spatial_only
from volseg.parallel.spatial.operators.planes import AxisPlan, LocalWindow, constant, select_planes, sharded_windows
from volseg.parallel.spatial.operators.pooling import adaptive_pool
from volseg.parallel.spatial.pending import PLAIN
from volseg.parallel.spatial.plan.windows import ChosenPlanes, Resize, nearest_planes
from volseg.parallel.spatial.sources import Moment, Unchanged
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap

NEAREST = ("nearest", "nearest-exact")
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


RESIZED = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")

TREATED = f"input {' '.join(RESIZED)} antialias"


@handles("Interpolation", "F.interpolate", treats=TREATED, samples=each_sample)
@handles("Interpolation", "F.upsample", treats=TREATED)
def interpolate(func: Callable, settings: Any) -> Any:
    """Blend planes along the cut, then let torch interpolate within them: linear interpolation is separable."""
    volume, mode = settings.input, settings.mode
    given: dict[str, Any] = {name: getattr(settings, name) for name in RESIZED}  # F.upsample calls F.interpolate
    count = volume.ndim - 2
    if mode == "area":
        sizes = _sizes(volume, given, count)
        pool = getattr(F, f"adaptive_avg_pool{count}d")
        return adaptive_pool(pool, volume, sizes)
    known = mode in NEAREST or mode == LINEAR.get(count)
    if not known or settings.antialias or not spatial_only(volume, count):
        refuse(f"mode={mode!r} is none of {', '.join(NEAREST)}, {LINEAR[count]}, area")
    sizes = _sizes(volume, given, count)
    scales = _given_scales(given, count)
    corners = bool(given["align_corners"])
    if _is_doubled(volume, mode, sizes, scales, corners):
        return _double_in_own_type(volume, mode)
    same = [volume.shape[2 + i] == sizes[i] for i in range(count)]
    # torch may shift planes by a factor that keeps their number.
    moves = any(same[i] and scales[i] not in (None, 1.0) and not corners for i in range(count))
    plans = []
    for dim, size in zip(volume.dims, volume.sizes, strict=True):
        i = dim - 2
        window: Any = Resize(size, sizes[i], scales[i], corners)
        if mode in NEAREST:
            planes = nearest_planes(size, sizes[i], mode, scales[i])
            window = None if planes is None else ChosenPlanes(planes)
        plans.append(AxisPlan(window, sizes[i]))
    if volume.context.communicator.num_shards > 1 and (moves or any(plan.window is None for plan in plans)):
        say_gathered(volume, "calls F.interpolate with")
        return cut_if_thick(F.interpolate(volume.full_tensor(), **given), volume)
    cut = {dim - 2 for dim in volume.dims}

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        for dim, plan, window in zip(volume.dims, plans, windows, strict=True):
            slab = _blend(slab, dim, plan.window, window)  # type: ignore[arg-type]
        return slab if all(i in cut or same[i] for i in range(count)) else _within(slab, sizes, scales, cut, given)

    def whole(tensor: Tensor) -> Tensor:
        return F.interpolate(tensor, **given)

    return sharded_windows(volume, plans, local, whole)


def _is_doubled(volume: ShardedVolume, mode: str, sizes: list[int], scales: list[float | None], corners: bool) -> bool:
    """Return whether D, H and W are doubled in a mode that our kernels compute."""
    twice = sizes == [2 * size for size in volume.shape[2:]] and all(scale in (None, 2.0) for scale in scales)
    taken = volume.ndim == 5 and volume.dims == (DIM,) and volume.merged is None and mode in ("nearest", "trilinear")
    # Outside of the network only a loss reads the result, in torch's element type.
    own = volume.context.in_network or not _is_widened(volume)
    return taken and twice and not corners and own and volume.numel() > 0 and _takes(volume)


def _is_widened(volume: ShardedVolume) -> bool:
    """Return whether autocast would make torch's result float32."""
    return volume.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(volume.device.type)


def _takes(volume: ShardedVolume) -> bool:
    return fusions.is_on("doubling") and upsample2x.takes(volume)


def _double_in_own_type(volume: ShardedVolume, mode: str) -> Any:
    """Return the doubled volume; ``widen`` computes its float32 voxels, for example if the network returns it."""
    result = _double(volume, mode)
    if _is_widened(volume) and isinstance(result, ShardedVolume):
        moment, unchanged = Moment(), Unchanged(list(volume._slabs))

        def widen(result: ShardedVolume) -> ShardedVolume:
            with moment.restored(), torch.autocast(volume.device.type, enabled=False):
                if result.pending is not PLAIN or not unchanged.holds():  # read, hooked or changed: convert its slabs
                    return wrap(result, [slab.float() for slab in result.slabs])
                wide: ShardedVolume = _double(wrap(volume, [slab.float() for slab in volume.slabs]), mode)
                return wide

        result.widen = widen
    return result


def _double(volume: ShardedVolume, mode: str) -> Any:
    linear, planes = mode == "trilinear", volume.shape[DIM]
    along = Resize(planes, 2 * planes) if linear else ChosenPlanes(tuple(plane // 2 for plane in range(2 * planes)))

    def double(slab: Tensor, part: upsample2x.DoubledPart) -> Tensor:
        shape = slab.shape

        def gather(gradient: Tensor) -> Tensor:
            return upsample2x.gather_gradient(gradient, shape, part, linear)

        doubled: Tensor = LinearMap.apply(lambda own: upsample2x.double(own, part, linear), gather, slab)
        return doubled

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        (window,) = windows
        return double(slab, upsample2x.DoubledPart(planes, window.span[0], window.output))

    def whole(tensor: Tensor) -> Tensor:
        return double(tensor, upsample2x.DoubledPart(planes, 0, (0, 2 * planes)))

    return sharded_windows(volume, [AxisPlan(along, 2 * planes)], local, whole)


def _within(slab: Tensor, sizes: list[int], scales: list[float | None], cut: set[int], given: dict) -> Tensor:
    """Interpolate along the uncut dims; along the cut dims the slab already has the output planes."""
    count = slab.ndim - 2
    corners, mode = given["align_corners"], given["mode"]
    if given["scale_factor"] is not None and not given["recompute_scale_factor"]:
        factors = [1.0 if i in cut else scales[i] for i in range(count)]
        return F.interpolate(slab, scale_factor=factors, mode=mode, align_corners=corners)  # type: ignore[arg-type]
    size = [slab.shape[2 + i] if i in cut else sizes[i] for i in range(count)]
    return F.interpolate(slab, size=size, mode=mode, align_corners=corners)


def _blend(slab: Tensor, dim: int, resize: Resize | ChosenPlanes, window: LocalWindow) -> Tensor:
    """Return the output planes of a slab along one cut dim."""
    sources = [resize.source(plane) for plane in range(*window.output)]
    start = window.span[0]
    first = select_planes(slab, dim, [low - start for low, _, _ in sources])
    weights = tuple(weight for _, _, weight in sources)
    if not any(weights):
        return first
    second = select_planes(slab, dim, [high - start for _, high, _ in sources])
    weight = constant(weights, slab.dtype, slab.device)
    return torch.lerp(first, second, weight.reshape([-1] + [1] * (slab.ndim - dim - 1)))


def _sizes(volume: ShardedVolume, given: dict, count: int) -> list[int]:
    if given["size"] is not None:
        return [int(size) for size in per_dim(given["size"], count)]
    factors = per_dim(given["scale_factor"], count)
    return [int(size * factor) for size, factor in zip(volume.shape[2:], factors, strict=True)]


def _given_scales(given: dict, count: int) -> list[float | None]:
    """Return the factors that torch uses for coordinates; None if it uses the ratio of the sizes."""
    if given["scale_factor"] is None or given["recompute_scale_factor"]:
        return [None] * count
    return [float(factor) for factor in per_dim(given["scale_factor"], count)]
