"""Which planes of its direct neighbours each shard reads: pure arithmetic."""

from functools import lru_cache

from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.plan.windows import Window

__all__ = ["plan_halo"]


@lru_cache(maxsize=1024)
def plan_halo(size: int, num_shards: int, window: Window, outputs: int) -> tuple[tuple[int, int], ...] | None:
    """Return the planes that each shard needs before and behind its slab, or None where it is not that simple.

    It is not where a shard needs less than its slab, or planes from further than the direct neighbour. The first plane
    that is computed from these may lie in front of the first output plane: a transposed convolution's does.
    """
    result = []
    owned = spans(size, num_shards)
    for index, (own, output) in enumerate(zip(owned, spans(outputs, num_shards), strict=True)):
        if output[0] == output[1]:
            return None
        need = window.need(*output)
        before, behind = own[0] - need[0], need[1] - own[1]
        if before < 0 or behind < 0:
            return None
        if index > 0 and before > owned[index - 1][1] - owned[index - 1][0]:
            return None
        if index < num_shards - 1 and behind > owned[index + 1][1] - owned[index + 1][0]:
            return None
        result.append((before, behind))
    return tuple(result)
