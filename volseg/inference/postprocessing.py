"""Postprocess predicted label maps: remove stray pieces and fill holes, where measurements show a gain.

A `Postprocessing` is a list of steps that `volseg.inference.measured_postprocessing` found to help, stored in
``postprocessing.json``. Pieces are components of 26 neighbours, as in nnU-Net (``skimage.measure.label`` with full
connectivity); all pieces of the largest size are kept. A hole is a set of voxels without a path of 6 neighbours to the
outside, as in `scipy.ndimage.binary_fill_holes`.

In a label map of overlapping regions, a value represents a set of regions. A voxel that leaves a structure gets the
value that keeps most of its other structures and adds none. A voxel that enters a structure gets the value that keeps
all its structures and adds the fewest. Without regions, removed voxels become background, and only background is
filled.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from monai.data import MetaTensor
from numpy.typing import NDArray
from scipy.ndimage import find_objects, generate_binary_structure, label
from torch import Tensor

from volseg.config.nearest import did_you_mean
from volseg.config.registry import read_record
from volseg.data.cases import Task, list_values
from volseg.data.json_files import read_json
from volseg.errors import ConfigError, DataError
from volseg.files import replacing

FORMAT = 1
"""Format of ``postprocessing.json``; other formats are refused."""

FULL = generate_binary_structure(3, 3)
"""Structuring element of 26 neighbours."""

Voxels = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation on one structure.

    Parameters
    ----------
    operation : str
        ``keep_largest`` removes all but the largest component, ``fill_holes`` fills enclosed voxels.
    values : tuple of int
        Values of the structure in the label map, or of the whole foreground.
    """

    operation: Literal["keep_largest", "fill_holes"]
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Postprocessing:
    """The steps for the label maps of a task, in order.

    Parameters
    ----------
    labels : tuple of int
        Every value of a label map, including 0.
    structures : tuple of tuple of int
        The values of each structure: the value of a label, or the values of a region.
    painted : tuple of int
        The preferred value of each structure, if several values are possible.
    steps : tuple of Step
        Steps to apply; without steps, a label map stays unchanged.
    """

    labels: tuple[int, ...]
    structures: tuple[tuple[int, ...], ...]
    painted: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @classmethod
    def of(cls, task: Task, steps: tuple[Step, ...] = ()) -> "Postprocessing":
        """Return the steps for label maps of ``task``."""
        structures = tuple(map(list_values, task.structures))
        painted = tuple(value for value in task.output_values if value != 0)
        return cls(labels=task.class_values, structures=structures, painted=painted, steps=steps)

    @classmethod
    def keep_largest(cls, task: Task, names: Collection[str]) -> "Postprocessing":
        """Return the steps that keep only the largest component of each named structure.

        Raises
        ------
        ConfigError
            If the task has no structure of a name.
        """
        values = {name: list_values(key) for key, name in task.structures.items()}
        if strange := [name for name in names if name not in values]:
            raise ConfigError(
                f"inference.keep_largest: no label is called {strange[0]!r}; {did_you_mean(strange[0], values)}"
            )
        return cls.of(task, tuple(Step(operation="keep_largest", values=values[name]) for name in names))

    @classmethod
    def load(cls, path: str | Path) -> "Postprocessing":
        """Read a ``postprocessing.json``.

        Raises
        ------
        DataError
            If the file is not a postprocessing.json, or has a format or steps that this version does not know.
        """
        content = read_json(Path(path), "a postprocessing.json")
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise DataError(
                f"{path} should be a postprocessing.json of format {FORMAT}, got {found!r}; write it again with "
                "`volseg postprocess`"
            )
        try:
            read = read_record(cls, {name: content[name] for name in ("labels", "structures", "painted", "steps")})
        except (KeyError, ValueError) as fault:
            raise DataError(
                f"{path} is not a postprocessing.json of volseg ({fault}); write it again with `volseg postprocess`"
            ) from fault
        read._require_sound(path)
        return read

    def save(self, path: str | Path, further: Mapping[str, Any] | None = None) -> Path:
        """Write the steps, and further facts about them, as JSON, atomically; return the path."""
        path = Path(path)
        content = {"format": FORMAT, **asdict(self), **(further or {})}
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def __call__(self, label_map: MetaTensor) -> MetaTensor:
        """Return a label map ``(1, D, H, W)`` after the steps, with the device and metadata of ``label_map``.

        Raises
        ------
        DataError
            For values that the task does not have.
        """
        if not self.steps:
            return label_map
        voxels = self.require_values(label_map)
        for step in self.steps:
            self.apply(voxels, step)
        is_narrow = label_map.dtype == torch.uint8 and max(self.labels) > 255
        dtype = torch.int32 if is_narrow else label_map.dtype
        changed = torch.from_numpy(voxels).reshape(label_map.shape).to(label_map.device, dtype)
        return MetaTensor(changed).copy_meta_from(label_map)

    def require_values(self, label_map: Tensor) -> Voxels:
        """Return a copy ``(D, H, W)`` of a label map as integers.

        Raises
        ------
        DataError
            For values that the task does not have.
        """
        plain = label_map.as_subclass(Tensor).detach().cpu()
        voxels = plain.reshape(plain.shape[-3:]).numpy()
        found = np.unique(voxels)
        if strange := sorted(set(found.tolist()) - set(self.labels)):
            raise DataError(
                f"the label map has the values {strange[:5]}, but the postprocessing was determined for the values "
                f"{list(self.labels)}; apply it to predictions of the same task"
            )
        return voxels.astype(np.uint8 if max(self.labels) <= 255 else np.int32)

    def apply(self, voxels: Voxels, step: Step) -> int:
        """Apply a step to a label map ``(D, H, W)`` in place; return the number of changed voxels."""
        mask = np.isin(voxels, step.values)
        for box in find_objects(mask.view(np.int8)):  # the box around the mask, if it is not empty
            inner = mask[box]
            where = _find_strays(inner) if step.operation == "keep_largest" else _find_holes(inner)
            old = voxels[box][where]
            new = self._list_replacements(step)[np.searchsorted(self.labels, old)]
            voxels[box][where] = new
            return int((old != new).sum())
        return 0

    def _list_replacements(self, step: Step) -> Voxels:
        """Return the replacement of each label by a step."""
        held = {value: frozenset(k for k, of in enumerate(self.structures) if value in of) for value in self.labels}
        if step.values not in self.structures:  # the foreground as a whole
            return np.zeros(len(self.labels), dtype=np.int64)
        place = self.structures.index(step.values)

        def prefer(value: int) -> tuple[bool, int]:
            return value != 0 and value not in self.painted, value

        replacements = []
        for value in self.labels:
            if step.operation == "keep_largest":
                wanted = held[value] - {place}
                fitting = [other for other in self.labels if held[other] <= wanted]
                chosen = min(fitting, key=lambda other: (-len(held[other]), *prefer(other)))
            else:
                wanted = held[value] | {place}
                fitting = [other for other in self.labels if held[other] >= wanted] or [value]
                chosen = min(fitting, key=lambda other: (len(held[other]), *prefer(other)))
            replacements.append(chosen)
        return np.array(replacements)

    def _require_sound(self, path: str | Path) -> None:
        sound = list(self.labels) == sorted(set(self.labels)) and 0 in self.labels and self.structures
        known = all(step.values and set(step.values) <= set(self.labels) - {0} for step in self.steps)
        within = all(set(values) <= set(self.labels) for values in self.structures)
        if not (sound and known and within):
            raise DataError(
                f"{path} has the steps {list(self.steps)} for the labels {list(self.labels)}; needed: operations on "
                "those labels. Write it again with `volseg postprocess`"
            )


def _find_strays(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the voxels of the mask that are outside its largest components."""
    components, count = label(mask, FULL)
    if count == 1:
        return np.zeros_like(mask)
    sizes = np.bincount(components.ravel())
    sizes[0] = 0
    is_stray = sizes < sizes.max()
    is_stray[0] = False
    return np.asarray(is_stray[components])


def _find_holes(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the voxels that the mask encloses; the mask touches every face of its array."""
    components, count = label(~mask)
    is_hole = np.ones(count + 1, dtype=bool)
    is_hole[0] = False
    for axis in range(mask.ndim):
        for face in (0, -1):
            is_hole[components.take(face, axis=axis)] = False
    return np.asarray(is_hole[components])
