"""Map the values of label files to the numbers of label maps in memory, and back.

In memory a label map is uint8, for any values in files::

    0 ... K-1        the class: the position of the file's value among the task's K, in ascending order
    K                no annotation of this voxel, in a task with a value to ``ignore``
    from there on    background of a partially labelled case: any class that was not annotated in the case

There is one number of the last kind for each set of values that cases were annotated with. So a label map contains all
that is known about each voxel, and code that cuts, moves or stores it needs only the count of numbers (`num_indices`).
`volseg.losses.Targets` gives the meaning of each number for each output of a network.
"""

from collections.abc import Mapping, Sequence

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task, list_values
from volseg.errors import DataError
from volseg.losses.known_voxels import Targets

MOST_INDICES = 256
"""Values of uint8."""

LABEL_COLOURS = (
    (230, 80, 60), (60, 150, 230), (90, 200, 110), (240, 190, 60), (170, 110, 220), (80, 210, 210), (240, 130, 180),
)  # fmt: skip
"""Colours (RGB, 0 to 255) of labels 1, 2, ...; further labels start again."""


def to_classes(label_map: Tensor, task: Task, case: Case | None = None) -> Tensor:
    """Return a label map of class indices, uint8 of the same shape.

    Parameters
    ----------
    label_map : Tensor
        Values of files: those of ``task.labels``, and ``task.ignore``. A MetaTensor keeps its metadata.
    task : Task
        Task of the values.
    case : Case, optional
        Case of the label map. If it has ``labelled``, background may hide classes without annotation; without a case,
        no class is hidden.

    Raises
    ------
    DataError
        For other values, or a case with a set of annotated values that no training case has.
    """
    known = list(task.file_values)
    numbers = list(range(len(known)))
    if case is not None and (labelled := task.labelled(case)) is not None:
        numbers[0] = len(known) + _place_labelled(labelled, case, task)
    table = torch.full((max(known) + 1,), -1, dtype=torch.int16)
    table[known] = torch.tensor(numbers, dtype=torch.int16)
    voxels = label_map.as_subclass(Tensor).contiguous()
    value = voxels.to(torch.int64, copy=True)
    is_value = (value >= 0) & (value < len(table)) & (value == voxels)
    found = table.to(voxels.device)[value.clamp_(0, len(table) - 1)]
    if bool((strange := ~is_value | (found < 0)).any()):
        subject = "the label map" if case is None else f"case {case['case']}: its label"
        raise DataError(
            f"{subject} has the values {voxels[strange].double().unique()[:5].tolist()}, but the values of {task.name} "
            f"are {sorted(known)}; correct the label map or declare the value"
        )
    return _with_metadata(found.to(torch.uint8), label_map)


def to_values(classes: Tensor, task: Task) -> Tensor:
    """Return a label map with the values of files: uint8 if they fit, else int32.

    Parameters
    ----------
    classes : Tensor
        Class indices from `to_classes`. Voxels of several possible classes become background.
    task : Task
        Task of the values.

    Raises
    ------
    DataError
        For an index without a meaning.
    """
    values = [*task.class_values, *([0] * (MOST_INDICES - task.num_classes))]
    if task.ignore is not None:
        values[task.num_classes] = task.ignore
    most = num_indices(task)
    plain = classes.as_subclass(Tensor)
    if plain.numel() and not 0 <= int(plain.min()) <= int(plain.max()) < most:
        raise DataError(f"class indices of {task.name} are 0 to {most - 1}, got {plain.min():g} to {plain.max():g}")
    dtype = torch.uint8 if max(values) <= 255 else torch.int32
    return _with_metadata(torch.tensor(values, dtype=dtype, device=plain.device)[plain.long()], classes)


def num_indices(task: Task) -> int:
    """Return the number of values that a label map of the task may have in memory.

    Raises
    ------
    DataError
        If they do not fit into one byte.
    """
    return targets_of(task).num_indices


def targets_of(task: Task) -> Targets:
    """Return the meaning of the label maps' numbers for the outputs of the task's networks."""
    index = {value: place for place, value in enumerate(task.class_values)}
    hidden = tuple(
        tuple(place for value, place in index.items() if value not in looked_for) for looked_for in _list_labelled(task)
    )
    targets = Targets(
        num_classes=task.num_classes,
        regions=tuple(tuple(index[value] for value in values) for values in task.regions.values()),
        ignores=task.ignore is not None,
        hidden=hidden,
    )
    if targets.num_indices > MOST_INDICES:
        raise DataError(
            f"{task.name} has {task.num_classes} labels, and cases that were annotated with {len(hidden)} different "
            f"sets of them; needed: at most {MOST_INDICES} of both together"
        )
    return targets


def _list_labelled(task: Task) -> Sequence[tuple[int, ...]]:
    """Return the incomplete sets of values that training cases were annotated with, in a fixed order."""
    return sorted({labelled for case in task.training if (labelled := task.labelled(case)) is not None})


def _place_labelled(labelled: tuple[int, ...], case: Case, task: Task) -> int:
    known = _list_labelled(task)
    if labelled not in known:
        raise DataError(
            f"case {case['case']} was annotated with {list(labelled)}, unlike all training cases of {task.name}; read "
            "it with the task that it belongs to"
        )
    return known.index(labelled)


def _with_metadata(voxels: Tensor, label_map: Tensor) -> Tensor:
    """Return ``voxels`` with the place in the patient of ``label_map``, if it has one."""
    return MetaTensor(voxels).copy_meta_from(label_map) if isinstance(label_map, MetaTensor) else voxels


def choose_colour(value: int) -> tuple[int, int, int]:
    """Return the colour (RGB, 0 to 255) of a value of label maps."""
    return LABEL_COLOURS[(value - 1) % len(LABEL_COLOURS)]


def format_colour_tables(names: Mapping[int, str]) -> dict[str, str]:
    """Return the names and colours of labels as contents of files for ITK-SNAP and 3D Slicer, by file name.

    Examples
    --------
    >>> files = format_colour_tables({1: "left kidney"})
    >>> print(files["labels.txt"], files["labels.ctbl"], end="")
    0 0 0 0 0 0 0 "Clear Label"
    1 230 80 60 1 1 1 "left kidney"
     0 background 0 0 0 0
    1 left_kidney 230 80 60 255
    """
    snap, slicer = ['0 0 0 0 0 0 0 "Clear Label"'], ["0 background 0 0 0 0"]
    for value, name in names.items():
        red, green, blue = choose_colour(value)
        plain = " ".join(name.replace('"', "'").split())
        snap.append(f'{value} {red} {green} {blue} 1 1 1 "{plain}"')
        slicer.append(f"{value} {plain.replace(' ', '_')} {red} {green} {blue} 255")
    return {"labels.txt": "\n".join(snap) + "\n", "labels.ctbl": "\n".join(slicer) + "\n"}


def format_label_table(names: Mapping[int, str]) -> bytes:
    """Return the names and colours of labels as the XML of a NIfTI header extension, in TotalSegmentator's form.

    It is the label table of Caret and Connectome Workbench.

    Examples
    --------
    >>> format_label_table({1: "Anterior"}).decode().count("<![CDATA[Anterior]]>")
    1
    """
    rows = []
    for value, name in names.items():
        red, green, blue = (colour / 255 for colour in choose_colour(value))
        colour = f'Red="{red:.4f}" Green="{green:.4f}" Blue="{blue:.4f}" Alpha="1"'
        rows.append(f'<Label Key="{value}" {colour}><![CDATA[{name.replace("]]>", "]] >")}]]></Label>\n')
    table = f"<LabelTable>\n{''.join(rows)}</LabelTable>"
    volume = f'<VolumeInformation Index="0">{table}<VolumeType><![CDATA[Label]]></VolumeType></VolumeInformation>'
    return f'<?xml version="1.0" encoding="UTF-8"?><CaretExtension>{volume}</CaretExtension>\n'.encode()


def measure_volumes(label_map: MetaTensor, task: Task) -> dict[str, float]:
    """Return the volume (ml) of each label or region in a label map of the files' values."""
    counts = torch.bincount(label_map.as_tensor().flatten()).tolist()
    voxel = abs(float(torch.linalg.det(label_map.affine[:3, :3].double()))) / 1000
    volumes = {}
    for structure, name in task.structures.items():
        volumes[name] = voxel * sum(counts[value] for value in list_values(structure) if value < len(counts))
    return volumes
