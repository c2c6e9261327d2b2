"""Definitions of a case, a batch and a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from volseg.data.splits import Split
from volseg.errors import DataError
from volseg.fields import Batch, Case

__all__ = ["MOST_CLASSES", "Batch", "Case", "Structure", "Task", "list_values"]

MOST_CLASSES = 254
"""Label maps in memory are uint8: these, the ignored voxels, and one spare number."""

LARGEST_VALUE = 2**24 - 1
"""Largest value of a label file, which is read as float32."""

Structure = int | tuple[int, ...]
"""A scored structure: a value of label maps, or the values of a region."""


def list_values(structure: Structure) -> tuple[int, ...]:
    """Return the values that a structure has in label maps."""
    return structure if isinstance(structure, tuple) else (structure,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A segmentation problem: its cases (paths, sorted by id), its channels and its labels.

    Raises
    ------
    DataError
        If labels, regions and the ignored value do not fit together.
    """

    name: str
    root: Path
    modalities: tuple[str, ...]
    """Name of each image channel, in the order of the channels."""
    labels: dict[int, str]
    """Name of each value of a label map, including 0 (background)."""
    training: tuple[Case, ...]
    test: tuple[Case, ...]
    """Cases without labels."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Values of each structure that may overlap others, in the order of painting into a label map: a later region
    covers earlier ones. Empty: the values themselves are the structures."""
    ignore: int | None = None
    """Value of voxels without annotation, which are neither trained on nor scored; no key of ``labels``."""
    splits: tuple[Split, ...] = ()
    """Training and validation cases of each fold, if the data set defines folds."""
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further facts about the cases, such as their patients: by column, and by case."""

    stage_labels: tuple[int, ...] = ()
    """Values of a previous stage's label maps; their masks are further input channels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))
        shown = sorted(self.labels)
        if 0 not in self.labels or not 0 <= shown[0] <= max(shown[-1], self.ignore or 0) <= LARGEST_VALUE:
            raise DataError(
                f"{self.name}: labels need 0 for the background and values up to {LARGEST_VALUE}, got {shown} and "
                f"{self.ignore} to ignore"
            )
        if len(shown) > MOST_CLASSES:
            raise DataError(f"{self.name}: a task has {MOST_CLASSES} labels at most, got {len(shown)}; merge some")
        if self.ignore is not None and (self.ignore in self.labels or self.ignore < 0):
            raise DataError(
                f"{self.name}: the value to ignore is {self.ignore}; needed: a positive one that is no label, and the "
                f"labels are {shown}"
            )
        for name, values in self.regions.items():
            if not values or 0 in values or not self.labels.keys() >= set(values):
                raise DataError(
                    f"{self.name}: the region {name!r} is made of {list(values)}; needed: values of labels without the "
                    f"background, of {shown[1:]}"
                )
        if len({frozenset(values) for values in self.regions.values()}) < len(self.regions):
            raise DataError(f"{self.name}: two of the regions {dict(self.regions)} are the same; keep one of them")

    @property
    def num_channels(self) -> int:
        """Channels of every image."""
        return len(self.modalities)

    @property
    def num_inputs(self) -> int:
        """Input channels of a network: those of the image, and the masks of a previous stage."""
        return len(self.modalities) + len(self.stage_labels)

    @property
    def num_classes(self) -> int:
        """Classes of a voxel, background included; a class's index is the rank of its value."""
        return len(self.labels)

    @property
    def num_outputs(self) -> int:
        """Channels of a network's logits: one per class (softmax), or one per region (sigmoid) if there are any."""
        return len(self.regions) or self.num_classes

    @property
    def class_values(self) -> tuple[int, ...]:
        """Value of each class in files, in the order of the classes' indices."""
        return tuple(sorted(self.labels))

    @property
    def output_values(self) -> tuple[int, ...]:
        """Value of each output in a written label map: that of its class, or the value painted for its region.

        A region is painted with its first declared value that no later region has. If it has no such value (it is the
        union of later regions), it is painted with its first value.
        """
        if not self.regions:
            return self.class_values
        regions = list(self.regions.values())
        painted = []
        for place, values in enumerate(regions):
            later = {value for region in regions[place + 1 :] for value in region}
            painted.append(next((value for value in values if value not in later), values[0]))
        return tuple(painted)

    @property
    def foreground(self) -> dict[int, str]:
        """The labels without the background."""
        return {value: name for value, name in self.labels.items() if value != 0}

    @property
    def value_names(self) -> dict[int, str]:
        """Name of each foreground value of a label map; empty for regions, since a value may be in several."""
        return {} if self.regions else self.foreground

    @property
    def structures(self) -> dict[Structure, str]:
        """Name of each scored structure: regions if there are any, else the foreground's values.

        The keys are nnU-Net's: the sorted values of a region, or its single value.
        """
        if not self.regions:
            return {value: self.labels[value] for value in self.class_values if value != 0}
        return {tuple(sorted(values)) if len(values) > 1 else values[0]: name for name, values in self.regions.items()}

    def labelled(self, case: Case) -> tuple[int, ...] | None:
        """Return the values that were annotated in a case, in order, or None if all were.

        Raises
        ------
        DataError
            If the case names no value, or values that the task does not have.
        """
        if case.get("labelled") is None:
            return None
        values = sorted(set(case["labelled"]) - {0})
        if not values or not self.labels.keys() >= set(values):
            raise DataError(
                f"case {case['case']}: 'labelled' should name the values that were looked for in it, of "
                f"{list(self.class_values[1:])}, got {list(case['labelled'])}"
            )
        return None if len(values) == self.num_classes - 1 else tuple(values)
