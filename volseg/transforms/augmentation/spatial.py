"""Move voxels: crop, rotate, scale, deform elastically and mirror a patch in one interpolation.

A position is an offset from the patch's centre in voxels. A patch voxel at offset o is read from the source at offset
::

    S^-1 R S scale (mirror o + elastic(o))          S: spacing in mm, so that R is a rotation of the patient

Voxels are interpolated once, by one ``grid_sample``. Samples that are only cropped and mirrored are not interpolated
at all: their voxels are copied, bit for bit.

Grid coordinates are computed by broadcast additions, not by ``affine_grid``: that is a matrix product, which TF32, if
the user allows it, would round by up to 0.1 voxel at the border of a large patch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from volseg.config.augmentation import AugmentationConfig
from volseg.device.gpus import keeping, on_gpu
from volseg.transforms.augmentation.parameters import AugmentationParameters

Size = tuple[int, int, int]


def margin_voxels(config: AugmentationConfig, patch_size: Sequence[int], spacing: Sequence[float]) -> Size:
    """Return the margin in voxels beyond each face that the strongest draw reads, times ``config.margin``.

    The margin is the largest over a fine grid of the allowed angles, with the largest scale and displacement, widened
    by the error between the grid's points.
    """
    half = torch.tensor([(size - 1) / 2 for size in patch_size], dtype=torch.float64)
    stretch = max(config.scaling.factor[1], 1.0) if config.scaling.probability > 0 else 1.0
    if config.elastic.probability > 0:
        half = half + config.elastic.displacement_voxels[1]
    scaled = [stretch if scales else 1.0 for scales in config.scaling.axes]
    half = half * torch.tensor(scaled, dtype=torch.float64)
    limits = config.rotation.degrees if config.rotation.probability > 0 else (0.0, 0.0, 0.0)
    steps = 16
    ticks = [torch.linspace(-math.radians(a), math.radians(a), steps + 1, dtype=torch.float64) for a in limits]
    angles = torch.cartesian_prod(*ticks)
    size = torch.tensor(spacing, dtype=torch.float64)
    turned = (_compute_rotation(angles).abs() @ (half * size)).amax(0)
    # Between two grid points an angle is off by at most half a step, and the position by that times the radius, except
    # along the axis of the only rotation.
    moves = torch.tensor([any(limits[:axis] + limits[axis + 1 :]) for axis in range(3)])
    gap = sum(math.radians(limit) / steps for limit in limits) * (half * size).norm() * moves
    reach = torch.maximum(turned, torch.minimum(turned + gap, (half * size).norm()))
    beyond = (reach / size - torch.tensor([(n - 1) / 2 for n in patch_size])).clamp(min=0)
    d, h, w = (math.ceil(voxels * config.margin - 1e-9) for voxels in beyond.tolist())
    return d, h, w


def is_moved(parameters: AugmentationParameters) -> Tensor:
    """Return which samples need interpolation, (B,) bool."""
    turned = (parameters.rotation != 0).any(1) | (parameters.scale != 1).any(1)
    return turned | (parameters.elastic != 0).flatten(1).any(1) if parameters.elastic.numel() else turned


def crop_and_mirror(volumes: Sequence[Tensor], mirror: Tensor, patch_size: Size) -> list[Tensor]:
    """Return an exact copy of the centre of each (B, C, *source), mirrored as drawn."""
    # On a CPU this is ten times as fast as a gather, and does not wait for a device.
    if mirror.device.type == "cpu" and not on_gpu(mirror):
        dims = [[axis - 3 for axis, flip in enumerate(flips) if flip] for flips in mirror.tolist()]
        return [
            torch.stack([sample.flip(d) for sample, d in zip(_crop_centre(volume, patch_size), dims, strict=True)])
            for volume in volumes
        ]
    return _gather_mirrored(volumes, mirror, patch_size)


def _crop_centre(volume: Tensor, size: Size) -> Tensor:
    for dim, side in enumerate(size, start=2):
        volume = volume.narrow(dim, (volume.shape[dim] - side) // 2, side)
    return volume


def _gather_mirrored(volumes: Sequence[Tensor], mirror: Tensor, patch_size: Size) -> list[Tensor]:
    """Crop and mirror in one gather, without reading ``mirror`` on the host."""
    index = []
    for axis, side in enumerate(patch_size):
        forth = torch.arange(side, device=mirror.device)
        chosen = torch.where(mirror[:, axis, None], side - 1 - forth, forth)
        index.append(chosen.view(-1, *(side if axis == a else 1 for a in range(-1, 3))))
    sample = torch.arange(len(mirror), device=mirror.device).view(-1, 1, 1, 1, 1)
    channels = [torch.arange(volume.shape[1], device=mirror.device).view(1, -1, 1, 1, 1) for volume in volumes]
    return [
        _crop_centre(volume, patch_size)[sample, channel, index[0], index[1], index[2]]
        for volume, channel in zip(volumes, channels, strict=True)
    ]


def sampling_grid(
    parameters: AugmentationParameters, patch_size: Size, source_size: Size, spacing: Sequence[float]
) -> Tensor:
    """Return where ``grid_sample`` reads each voxel, (B, D, H, W, 3); the last dim's order is W, H, D."""
    device = parameters.rotation.device
    # In grid_sample's units: with align_corners=False the source spans [-1, 1] from face to face, so n voxels are
    # 2 n / size.
    columns = _compute_columns(parameters, spacing, [2 / size for size in source_size]).flip(2)[
        :, :, None, None, None, :
    ]
    sign = _compute_sign(parameters)[:, :, None, None, None, None]
    signed = (columns * sign).unbind(1)
    d, h, w = (positions(size, device) - (size - 1) / 2 for size in patch_size)
    grid = d.view(-1, 1, 1, 1) * signed[0]
    grid = torch.addcmul(grid, h.view(-1, 1, 1), signed[1])
    grid = torch.addcmul(grid, w.view(-1, 1), signed[2])
    if parameters.elastic.numel():
        shift = displacement(parameters.elastic, patch_size)
        for axis, column in enumerate(columns.unbind(1)):
            grid = torch.addcmul(grid, shift[:, axis, ..., None], column)
    return grid


def voxel_steps(
    parameters: AugmentationParameters, patch_size: Size, spacing: Sequence[float]
) -> tuple[Tensor, Tensor | None]:
    """Return the step in source voxels (D, H, W) per voxel along each axis of the patch, (B, axis, 3), and shifts.

    The shifts are elastic displacements (B, 3, D, H, W), which are added to a voxel's offset from the patch's centre;
    None if there are none.
    """
    sign = _compute_sign(parameters)
    columns = _compute_columns(parameters, spacing, (1.0, 1.0, 1.0)) * sign[:, :, None]
    if not parameters.elastic.numel():
        return columns, None
    return columns, displacement(parameters.elastic, patch_size) * sign[:, :, None, None, None]


def _compute_columns(parameters: AugmentationParameters, spacing: Sequence[float], units: Sequence[float]) -> Tensor:
    """Return the step in the source, in ``units``, per voxel along each axis of an unmirrored patch, (B, axis, to)."""
    between = [spacing[axis] / spacing[to] * units[to] for to in range(3) for axis in range(3)]  # through mm
    turn = _compute_rotation(parameters.rotation) * constant(tuple(between), parameters.rotation.device).view(3, 3)
    return (turn * parameters.scale[:, None, :]).transpose(1, 2)


def _compute_sign(parameters: AugmentationParameters) -> Tensor:
    return 1 - 2 * parameters.mirror.float()


def without_idle_border(grid: Tensor, source_size: Size) -> tuple[tuple[slice, slice, slice], Tensor]:
    """Return the part of the source that ``grid`` reads, and the grid on it; reads values, so only for a CPU."""
    reach = grid.abs().amax((0, 1, 2, 3)).flip(0).tolist()
    # Half a source's voxels times the reach, and one more for the interpolation.
    idle = [max(0, size // 2 - math.ceil(far * size / 2 + 1)) for far, size in zip(reach, source_size, strict=True)]
    d, h, w = (slice(cut, size - cut) for cut, size in zip(idle, source_size, strict=True))
    widen = [size / (size - 2 * cut) for cut, size in zip(idle, source_size, strict=True)]
    return (d, h, w), grid * torch.tensor(widen[::-1])


def displacement(control: Tensor, patch_size: Size) -> Tensor:
    """Return the cubic B-spline through control points (B, 3, k, l, m) at every voxel, (B, 3, D, H, W).

    References
    ----------
    .. [1] D. Rueckert et al., "Nonrigid registration using free-form deformations", IEEE TMI 18(8), 1999, eq. 1,
       doi:10.1109/42.796284.
    """
    weights = [
        _compute_spline_weights(size, points, control.device)
        for size, points in zip(patch_size, control.shape[2:], strict=True)
    ]
    return torch.einsum("bcklm,dk,hl,wm->bcdhw", control, *weights)


def resample(image: Tensor, label: Tensor, grid: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor]:
    """Read image (linear) and label at ``grid``; voxels outside the source are zero.

    With ``num_classes`` a label is the class with the largest interpolated share, in the one pass that also reads the
    image; without it, the label of the nearest voxel.
    """
    if num_classes is None:
        nearest = grid_sample(label.float(), grid, "nearest", "zeros", align_corners=False)
        return grid_sample(image, grid, "bilinear", "zeros", align_corners=False), nearest.to(label.dtype)
    # Background is 1 minus the foreground, so it needs no channel; beyond the border, all is background.
    classes = torch.arange(1, num_classes, device=label.device, dtype=label.dtype).view(1, -1, 1, 1, 1)
    both = image.new_empty(len(image), image.shape[1] + num_classes - 1, *image.shape[2:])
    both[:, : image.shape[1]] = image
    both[:, image.shape[1] :] = label == classes  # written once; a concatenation would write and read it again
    read = grid_sample(both, grid, "bilinear", "zeros", align_corners=False)
    image, shares = read[:, : image.shape[1]], read[:, image.shape[1] :]
    share, foreground = shares.max(dim=1, keepdim=True)
    background = 1 - shares.sum(dim=1, keepdim=True)
    return image, torch.where(share > background, foreground + 1, 0).to(label.dtype)


def _compute_rotation(angles: Tensor) -> Tensor:
    """Return R_W R_H R_D, rotations about each axis in turn, (..., 3, 3)."""
    c, s = angles.cos().unbind(-1), angles.sin().unbind(-1)
    (cd, ch, cw), (sd, sh, sw) = c, s
    rows = [
        [cw * ch, cw * sh * sd - sw * cd, cw * sh * cd + sw * sd],
        [sw * ch, sw * sh * sd + cw * cd, sw * sh * cd - cw * sd],
        [-sh, ch * sd, ch * cd],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _compute_spline_weights(size: int, points: int, device: torch.device) -> Tensor:
    """Return the weight of each control point at each voxel, (size, points); each row sums to one."""
    position = (torch.arange(size, device=device) + 0.5) * ((points - 3) / size) + 1
    distance = (position[:, None] - torch.arange(points, device=device)).abs()
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = (2 - distance).clamp(min=0) ** 3 / 6
    return torch.where(distance < 1, near, far)


@keeping()
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``values`` as a shared float32 tensor; do not write to it."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@keeping()
def positions(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... ``size - 1`` in float32, as a shared tensor; do not write to it."""
    return torch.arange(size, dtype=torch.float32, device=device)
