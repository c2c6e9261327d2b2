"""Plan whether and how a convolution takes its halo in place: by sizes only, so that all processes agree.

It is possible if each shard needs its whole slab, and planes of its direct neighbours only. This holds for every
convolution of the usual networks, unless the sizes divide badly.
"""

from dataclasses import dataclass, replace

from volseg.device.convolution.settings import Settings
from volseg.device.layout import DIM
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.plan.windows import Convolution, TransposedConvolution, Window, plan_halo
from volseg.parallel.spatial.transport.halo import Halo, plan_halos
from volseg.parallel.spatial.volume import ShardedVolume

TILE_ELEMENTS = 2**26
"""Elements of a convolution's input in one tile: 128 MiB in half precision, which still fills a GPU."""

MOST_TILES = 16
"""Limit of tiles per slab: only a few tiles are in memory at a time, so more would save little and cost host time."""


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """Plan by which this process convolves its slabs.

    Attributes
    ----------
    settings
        Settings of the convolution of a slab with its halo.
    halos
        Halo of each slab; empty if no shard needs one.
    outputs
        Number of output planes of the whole volume.
    channels_last
        Whether the result is in channels-last layout.
    in_parts
        Whether the gradients of joined inputs are computed one after the other, to save memory.
    tiles
        Number of tiles in which a slab may be convolved, from front to back.
    around
        Plan for the gradients of a slab's own planes; None if the gradient of the input's halo travels.
    owed
        Output planes of each slab, if more are computed behind them; otherwise empty.
    """

    settings: Settings
    halos: tuple[Halo, ...]
    outputs: int
    channels_last: bool = False
    in_parts: bool = False
    tiles: int = 1
    around: "AroundPlan | None" = None
    owed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AroundPlan:
    """Plan for the gradients of a slab's own planes, from its output's gradient and the neighbours' planes around it.

    Attributes
    ----------
    halos
        Halo of each output's gradient.
    settings
        Settings of the convolution from a slab's own planes to its output and the neighbours' planes.
    alone
        Settings from a slab's own planes to its output only, if they exist.
    reach
        Number of output planes that one plane of the input reaches.
    step
        Step in output planes between the first planes that neighbouring input planes reach.
    """

    halos: tuple[Halo, ...]
    settings: Settings
    alone: Settings | None
    reach: int
    step: int = 1


def plan_convolution(
    volume: ShardedVolume, window: Window, outputs: int, whole: Settings, along: Settings, reach: int
) -> ConvolutionPlan | None:
    """Return the plan, or None if the general exchange is needed.

    Parameters
    ----------
    volume
        The input, which defines the cut and the context.
    window
        The convolution along the cut.
    outputs
        Number of output planes of the whole volume.
    whole
        The convolution's settings on one device.
    along
        Settings for a slab: without padding along the cut.
    reach
        Number of planes from the first to the last that one output plane reads.
    """
    context = volume.context
    communicator = context.communicator
    if len(volume.dims) != 1 or not communicator.is_direct or volume.ndim != len(whole.stride) + 2:
        return None  # for example a volume without a batch
    (size,) = volume.sizes
    tiles = _count_tiles(volume, whole, outputs, reach) if context.tiled else 1
    if communicator.num_shards == 1:
        return ConvolutionPlan(whole, (), outputs, context.channels_last, context.frugal, tiles=tiles)
    if volume.dims != (DIM,) or volume.ndim != 5:
        return None
    planes = plan_halo(size, communicator.num_shards, window, outputs)
    if planes is None:
        return None
    given = [sum(around) + own for around, own in zip(planes, _count(size, len(planes)), strict=True)]
    # Without padding each shard must compute just its own outputs from its slab and its halo.
    if [(count - reach) // whole.stride[0] + 1 for count in given] != _count(outputs, len(planes)):
        return None
    same = whole.stride[0] == 1 and outputs == size and set(sum(planes, ())) == {(reach - 1) / 2}
    halos = plan_halos(communicator, planes, context.channels_last)
    plan = ConvolutionPlan(along, halos, outputs, context.channels_last, context.frugal, tiles if same else 1)
    if not halos or not same or whole.dilation[0] > 1:
        return plan
    wide = replace(along, padding=(reach - 1, *along.padding[1:]))
    return replace(plan, around=AroundPlan(halos, wide, whole, reach))


def plan_transposed(
    volume: ShardedVolume, window: TransposedConvolution, outputs: int, along: Settings
) -> ConvolutionPlan | None:
    """Return the plan of a transposed convolution whose slabs need planes of their neighbours, otherwise None.

    Its gradients are those of a slab's own planes. These planes have written their outputs and, around them, some of
    the neighbours' outputs, whose gradient is fetched. So the weight's gradient also has each product once.

    Parameters
    ----------
    volume, window, outputs
        As in ``plan_convolution``.
    along
        Settings for a slab: without padding and output padding along the cut.
    """
    context = volume.context
    communicator = context.communicator
    if volume.dims != (DIM,) or volume.ndim != 5 or not communicator.is_direct or communicator.num_shards == 1:
        return None
    (size,), shards, stride = volume.sizes, communicator.num_shards, window.stride
    planes = plan_halo(size, shards, window, outputs)
    back = plan_halo(outputs, shards, Convolution(window.kernel, stride, window.padding, window.dilation), size)
    if planes is None or back is None:
        return None
    # Padding cuts off the planes in front of a slab's outputs; those behind are cut off afterwards.
    skipped = {start - window.first(start, stop) for start, stop in spans(outputs, shards)}
    (skip, *others), owed = skipped, _count(outputs, shards)
    given = [sum(around) + own for around, own in zip(planes, _count(size, shards), strict=True)]
    computed = [window.outputs(count, 0) + 2 * (window.padding - skip) for count in given]
    lacking = max(0, *(wanted - found for wanted, found in zip(owed, computed, strict=True)))
    if others or min(computed) < 1 or lacking >= stride:
        return None
    forward = replace(along, padding=(skip, *along.padding[1:]), output_padding=(lacking, *along.output_padding[1:]))
    halos, around = (plan_halos(communicator, each, context.channels_last) for each in (planes, back))
    if not halos or not around:
        return None
    # Padding cuts off equally many planes of the gradient in front and behind; output padding restores some of these.
    (front, behind), alone = back[0], None
    if len({*back}) == 1 and 0 <= front - behind < stride:
        extra = (front - behind, *along.output_padding[1:])
        alone = replace(along, padding=(front, *along.padding[1:]), output_padding=extra)
    reach = (window.kernel - 1) * window.dilation + 1
    back_plan = AroundPlan(around, along, alone, reach, stride)
    own = tuple(owed[index] for index in communicator.indices)
    return ConvolutionPlan(forward, halos, outputs, context.channels_last, around=back_plan, owed=own)


def _count_tiles(volume: ShardedVolume, settings: Settings, outputs: int, reach: int) -> int:
    """Return the number of tiles in which a slab is convolved, by sizes that all shards have in common.

    A slab is tiled only if outputs and inputs have the same planes, with equal padding on both sides.
    """
    same = settings.stride[0] == 1 and not settings.transposed and 2 * settings.padding[0] == reach - 1
    if not same or volume.dims != (DIM,) or volume.ndim != 5 or outputs != volume.shape[DIM]:
        return 1
    num_shards = volume.context.communicator.num_shards
    return count_tiles(volume.shape.numel() // num_shards, outputs // num_shards // reach)


def count_tiles(elements: int, most: int) -> int:
    """Return the number of tiles for a number of elements: one if there are few."""
    return max(1, min(most, MOST_TILES, -(-elements // TILE_ELEMENTS)))


def count_slab_tiles(volume: ShardedVolume, channels: int, itemsize: int) -> int:
    """Return the number of tiles in which a slab on a volume's grid is written; one if the slab is in memory.

    Parameters
    ----------
    volume
        A volume with any number of channels.
    channels, itemsize
        Channels and element size of the slab that is written.
    """
    context = volume.context
    known = volume.ndim == 5 and volume.dims == (DIM,) and volume.merged is None and context.communicator.is_direct
    if not context.tiled or not known:
        return 1
    num_shards = context.communicator.num_shards
    elements = volume.shape[0] * channels * volume.shape[DIM:].numel() * max(itemsize // 2, 1) // num_shards
    return count_tiles(elements, volume.shape[DIM] // num_shards)


def _count(size: int, num_shards: int) -> list[int]:
    """Return the number of planes of each shard's slab."""
    return [stop - start for start, stop in spans(size, num_shards)]
