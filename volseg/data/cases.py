"""What a case, a batch and a task are."""

from dataclasses import dataclass
from pathlib import Path

from volseg.fields import Batch, Case

__all__ = ["Batch", "Case", "Task"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A segmentation problem: its cases (paths, sorted by id), its channels and its labels."""

    name: str
    root: Path
    modalities: tuple[str, ...]
    """Name of each image channel, in the order of the channels."""
    labels: dict[int, str]
    """Name of each value of a label map, from 0 (background) to ``num_classes - 1``."""
    training: tuple[Case, ...]
    test: tuple[Case, ...]
    """Cases without labels."""

    @property
    def num_channels(self) -> int:
        """Channels of every image."""
        return len(self.modalities)

    @property
    def num_classes(self) -> int:
        """Classes that a network tells apart, background included."""
        return len(self.labels)

    @property
    def foreground(self) -> dict[int, str]:
        """The labels without the background."""
        return {value: name for value, name in self.labels.items() if value != 0}
