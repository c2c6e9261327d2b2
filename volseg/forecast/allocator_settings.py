"""How torch's allocator is told to divide memory; a setting that is not modelled is refused."""

import os
from dataclasses import dataclass
from typing import Any

from volseg.errors import ConfigError

__all__ = ["AllocatorSettings"]

MIB = 2**20

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment; where both are set torch takes the first, which torch 2.9 has brought."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says of how segments are made and divided."""

    expandable_segments: bool = False
    """Whether a pool's memory is one segment that grows by pages of 2 MiB (small) and 20 MiB (large)."""
    max_split_size: int | None = None
    """Bytes from which on a block is not divided."""
    large_segment: int = 20 * MIB
    """Bytes of a segment for what is smaller than 10 MiB, and of the large pages of an expandable one."""

    @classmethod
    def find(cls) -> "AllocatorSettings":
        """Return what this process's environment says: a training that is started from it has the same settings.

        Raises
        ------
        ConfigError
            See `read`.
        """
        set_here = [os.environ[name] for name in VARIABLES if name in os.environ]
        return cls.read(set_here[0] if set_here else "")

    @classmethod
    def read(cls, text: str) -> "AllocatorSettings":
        """Return what the variable's value means.

        Raises
        ------
        ConfigError
            For a setting that changes the pieces in a way that is not modelled.

        Examples
        --------
        >>> AllocatorSettings.read("expandable_segments:True").expandable_segments
        True
        """
        found: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (word.strip() for word in part.partition(":"))
            if name == "expandable_segments":
                found["expandable_segments"] = _read_truth(part, value)
            elif name == "max_split_size_mb":
                found["max_split_size"] = _read_mib(part, value)
            elif name == "large_segment_size_mb":
                found["large_segment"] = _read_mib(part, value)
            elif name not in WITHOUT_EFFECT and (name, value) != ("backend", "native"):
                raise ConfigError(
                    f"PYTORCH_CUDA_ALLOC_CONF has {part!r}, and how torch's allocator divides memory by that is not "
                    "modelled; forecast without it, or measure on the GPU"
                )
        return cls(**found)


WITHOUT_EFFECT = (
    *("pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads"),
    *("pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"),
)
"""Settings that leave the pieces as they are, as long as no recording's block is used on several streams."""


def _read_truth(part: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF has {part!r}; it takes True or False")
    return value == "True"


def _read_mib(part: str, value: str) -> int:
    if not value.isdecimal() or value == "0":
        raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF has {part!r}; it takes a number of MiB, 1 or more")
    return int(value) * MIB
