"""One volume over many devices: spatial model parallelism for unmodified networks."""

from volseg.parallel.sharding.strategy import SpatialStrategy
from volseg.parallel.sharding.volume import ShardedVolume

__all__ = ["ShardedVolume", "SpatialStrategy"]
