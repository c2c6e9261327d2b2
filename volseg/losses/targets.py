"""The meaning of a label map's numbers for each output of a network."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Meaning of the numbers in a label map, for a loss.

    A label map holds the classes ``0 ... K-1``, then a number for voxels without annotation, if there are any. Then
    follows a number for each set of classes that cannot be told apart in a case; see `volseg.data.labels`.
    """

    num_classes: int
    """K, background included."""
    regions: tuple[tuple[int, ...], ...] = ()
    """Classes of each sigmoid output of a network; empty for a softmax over the classes."""
    ignores: bool = False
    """Whether number K means a voxel without annotation."""
    hidden: tuple[tuple[int, ...], ...] = ()
    """Classes, with the background, that each number from ``first_hidden`` on may stand for."""

    @property
    def num_outputs(self) -> int:
        """Channels of the logits."""
        return len(self.regions) or self.num_classes

    @property
    def num_indices(self) -> int:
        """Count of the numbers that a label map may hold, from 0 on."""
        return self.first_hidden + len(self.hidden)

    @property
    def first_hidden(self) -> int:
        """The first number that stands for several classes."""
        return self.num_classes + int(self.ignores)

    @property
    def is_plain(self) -> bool:
        """Whether every voxel has one known class, and every class an output."""
        return not (self.regions or self.ignores or self.hidden)

    @property
    def possible(self) -> tuple[tuple[int, ...], ...]:
        """Classes that a voxel with each number may have."""
        every = tuple(range(self.num_classes))
        return (*((index,) for index in every), *((every,) if self.ignores else ()), *self.hidden)
