"""Arguments in the one form that handlers work with."""

from collections.abc import Sequence
from typing import Any

from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["dims_of", "per_dim", "spatial_only"]


def per_dim(value: int | float | Sequence, count: int) -> list:
    """Return one value per spatial dim; torch allows a single one for all."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * count if len(values) == 1 else values


def dims_of(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Return non-negative dims; ``None`` and an empty sequence mean all of them."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(ndim))
    return [d % ndim for d in (dim if isinstance(dim, Sequence) else [dim])]


def spatial_only(volume: Any, count: int) -> bool:
    """Say whether only the last ``count`` dims of the volume are cut."""
    return isinstance(volume, ShardedVolume) and all(dim >= volume.ndim - count for dim in volume.dims)
