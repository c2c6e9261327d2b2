"""What a case, a batch and a task are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from volseg.data.splits import Split
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
    """Name of each value of a label map, 0 (background) among them."""
    training: tuple[Case, ...]
    test: tuple[Case, ...]
    """Cases without labels."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Structures that may overlap, as the values that belong to each; in the order in which they are painted into a
    label map, where a later one lies over the earlier ones. Empty: the values themselves are told apart."""
    ignore: int | None = None
    """Value of voxels that nobody annotated, which are neither trained on nor judged; no key of ``labels``."""
    splits: tuple[Split, ...] = ()
    """Which cases train and which validate, fold by fold, where the data set itself says so."""

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
