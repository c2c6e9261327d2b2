"""How much memory of a device a trace takes."""

from dataclasses import dataclass, replace

__all__ = ["MemoryUse"]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peaks of one device, in bytes."""

    used: int
    """In blocks that somebody holds: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Taken from the device: ``torch.cuda.max_memory_reserved``."""
    outside: int
    """Taken beside torch's allocator: the context, libraries' own workspaces."""
    peak_in: str
    """The part of the step in which ``reserved`` was highest."""
    reserved_by_steps: int | None = None
    """Of ``reserved``, what was taken before the first validation; None where none is followed."""

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.reserved + self.outside

    def of_steps(self) -> "MemoryUse":
        """Return what the training steps reserve by themselves."""
        return self if self.reserved_by_steps is None else replace(self, reserved=self.reserved_by_steps)
