"""The old place of ``from_slab``, ``loads_batches``, ``scatter_batch``, ``slab_shape``."""

from volseg.parallel.sharding import moved

__getattr__ = moved(
    __name__, dict.fromkeys(["from_slab", "loads_batches", "scatter_batch", "slab_shape"], "volseg.parallel")
)
