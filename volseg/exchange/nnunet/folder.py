"""Read a model folder of nnU-Net 2: its plans, its task, and the checkpoints of its folds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from volseg.data.cases import Task
from volseg.data.json_files import read_json
from volseg.data.layouts.declared import read_channel_names, read_regions
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.exchange.nnunet.plans import NnunetPlan, parse_plan, read_plan
from volseg.exchange.tensors import read_torch_file

# Read the weights and settings that a prediction needs from nnU-Net's checkpoints.


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetWeights:
    """The parts of a checkpoint that a prediction needs."""

    configuration: str
    trainer: str
    mirror_axes: tuple[int, ...]
    """Axes along which images may be mirrored; 0, 1, 2 are the network's D, H, W."""
    weights: Mapping[str, Tensor]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the trainer; ``plans`` and ``dataset_json`` are those of the model folder."""


def read_checkpoint(path: Path) -> NnunetWeights:
    """Read a checkpoint of nnU-Net 2.

    Raises
    ------
    CheckpointError
        If it is absent or damaged, contains more than tensors and plain values, or is another program's.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name the checkpoint by --checkpoint, or copy the whole folder")
    return parse_nnunet(read_torch_file(path), path)


def parse_nnunet(content: Any, path: Path) -> NnunetWeights:
    """Return the parts of a checkpoint that a prediction needs; the errors are those of `read_checkpoint`."""
    wanted = ("network_weights", "init_args", "trainer_name")
    if not isinstance(content, dict) or any(key not in content for key in wanted):
        raise CheckpointError(f"{path} is not a checkpoint of nnU-Net 2, which contains {', '.join(wanted)}")
    weights, arguments, axes = (content.get(key) for key in (*wanted[:2], "inference_allowed_mirroring_axes"))
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path}: network_weights should map names to tensors; copy it again")
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    listed = axes if isinstance(axes, tuple | list) else () if axes is None else (axes,)
    if not isinstance(configuration, str) or not all(type(axis) is int and axis in range(3) for axis in listed):
        raise CheckpointError(
            f"{path} should name a configuration and mirroring axes among 0, 1, 2, got {configuration!r} and {axes!r}; "
            "copy it again"
        )
    return NnunetWeights(
        configuration=configuration,
        trainer=str(content["trainer_name"]),
        mirror_axes=tuple(listed),
        weights=weights,
        arguments=arguments or {},
    )


CHECKPOINT = "checkpoint_final.pth"

FILES = ("plans.json", "dataset.json")
"""Files of a model folder, in addition to its folds."""

OTHER_NETWORKS = re.compile(r"nnUNetTrainerBN|nnUNet_Primus.*|.*UMamba.*|nnUNetTrainer.*(Swin|Transformer).*")
"""Trainers whose network differs from their plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetModel:
    """Content of a model folder."""

    folder: Path
    """Folder of the model; for a checkpoint outside its folder, the file."""
    plan: NnunetPlan
    task: Task
    mirror_axes: tuple[int, ...]
    folds: tuple[str, ...]
    checkpoints: tuple[Path, ...]
    weights: tuple[Mapping[str, Tensor], ...]
    """Weights of each fold, by nnU-Net's names."""


def is_nnunet_model(path: str | Path) -> bool:
    """Return whether a folder is a model folder of nnU-Net 2."""
    return all((Path(path) / name).is_file() for name in FILES) and any(Path(path).glob("fold_*"))


def locate_nnunet(path: Path, checkpoint: str) -> tuple[Path, str, list[str] | None] | None:
    """Return the model folder, the checkpoint's name and the folds that a path denotes; None for any other path.

    Parameters
    ----------
    path : path
        A model folder, one of its folds, or a checkpoint in a fold.
    checkpoint : str
        Name of the checkpoint, unless ``path`` names it.
    """
    if is_nnunet_model(path):
        return path, checkpoint, None
    fold, name = (path.parent, path.name) if path.is_file() else (path, checkpoint)
    is_fold = fold.name.startswith("fold_") and is_nnunet_model(fold.parent)
    return (fold.parent, name, [fold.name.removeprefix("fold_")]) if is_fold else None


def read_alone(file: Path, weights: NnunetWeights) -> NnunetModel:
    """Return the model of a checkpoint outside its folder, from the plans in the checkpoint.

    Raises
    ------
    ConfigError, CheckpointError, DataError
        See `read_nnunet`.
    """
    missing = [key for key in ("plans", "dataset_json") if not isinstance(weights.arguments.get(key), dict)]
    if missing:
        raise ConfigError(f"{file} has no {missing[0]} in its init_args; name its model folder instead")
    _require_trainer(weights, file)
    plan = parse_plan(weights.arguments["plans"], file, weights.configuration)
    return NnunetModel(
        folder=file,
        plan=plan,
        task=_parse_task(weights.arguments["dataset_json"], file, file.parent, plan),
        mirror_axes=weights.mirror_axes,
        folds=(str(weights.arguments.get("fold")),),
        checkpoints=(file,),
        weights=(weights.weights,),
    )


def read_nnunet(
    folder: str | Path, *, checkpoint: str = CHECKPOINT, folds: Sequence[str | int] | None = None
) -> NnunetModel:
    """Read a model folder.

    Parameters
    ----------
    folder : path
        Folder with ``plans.json``, ``dataset.json`` and ``fold_0`` ... or ``fold_all``.
    checkpoint : str
        Name of the file in each fold's folder.
    folds : sequence, optional
        Folds to use; by default all numbered folds with the checkpoint, else ``all``, as in nnU-Net.

    Raises
    ------
    ConfigError
        For a configuration, a network or a trainer that is not supported.
    CheckpointError
        For a checkpoint that is absent, damaged, or unsafe to read.
    DataError
        For plans or a ``dataset.json`` that cannot be read.
    """
    folder = Path(folder)
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ConfigError(f"{folder} is not a model folder of nnU-Net 2: it has no {missing[0]}")
    chosen = _choose_folds(folder, checkpoint, folds)
    files = tuple(folder / f"fold_{fold}" / checkpoint for fold in chosen)
    read = [read_checkpoint(file) for file in files]
    first = read[0]
    if any(other.configuration != first.configuration for other in read):
        raise ConfigError(f"the folds of {folder} have different configurations; keep those of one")
    _require_trainer(first, folder)
    plan = read_plan(folder / "plans.json", first.configuration)
    return NnunetModel(
        folder=folder,
        plan=plan,
        task=_parse_task(read_json(folder / "dataset.json"), folder / "dataset.json", folder, plan),
        mirror_axes=first.mirror_axes,
        folds=tuple(chosen),
        checkpoints=files,
        weights=tuple(one.weights for one in read),
    )


def _choose_folds(folder: Path, checkpoint: str, wanted: Sequence[str | int] | None) -> list[str]:
    found = sorted(path.parent.name[5:] for path in folder.glob(f"fold_*/{checkpoint}"))
    if wanted is not None:
        if absent := [str(fold) for fold in wanted if str(fold) not in found]:
            raise CheckpointError(f"{folder} has no fold_{absent[0]}/{checkpoint}; it has folds {', '.join(found)}")
        return [str(fold) for fold in wanted]
    numbered = [fold for fold in found if fold != "all"]
    if not found:
        others = sorted({path.name for path in folder.glob("fold_*/*.pth")})
        raise CheckpointError(
            f"{folder} has no fold with {checkpoint}; "
            + (f"choose from {', '.join(others)} by --checkpoint" if others else "copy the folds' checkpoints too")
        )
    return numbered or found


def _require_trainer(weights: NnunetWeights, folder: Path) -> None:
    """Raise if the trainer's network is known to differ from the plans; for others, the weights decide."""
    if OTHER_NETWORKS.fullmatch(weights.trainer):
        raise ConfigError(
            f"{folder} was trained by {weights.trainer}, whose network differs from its plans; predict "
            "with nnU-Net itself"
        )


def _parse_task(declared: object, file: Path, root: Path, plan: NnunetPlan) -> Task:
    if not isinstance(declared, dict):
        raise DataError(f"{file} should describe nnU-Net's data set; copy the model folder again")
    channels, labels = read_channel_names(declared, file), read_regions(declared, file)
    if labels.regions and not declared.get("regions_class_order"):
        raise DataError(f"{file} declares regions but no regions_class_order, which nnU-Net needs to predict them")
    if len(channels) != len(plan.schemes):
        raise DataError(f"{file} names {len(channels)} channel(s), but the plans normalise {len(plan.schemes)}")
    if not labels.regions and list(labels.labels) != list(range(len(labels.labels))):
        raise DataError(f"{file} declares the labels {sorted(labels.labels)}; nnU-Net needs 0, 1, 2 ... without gaps")
    return Task(
        name=plan.dataset,
        root=root,
        modalities=channels,
        labels=labels.labels,
        regions=labels.regions,
        ignore=labels.ignore,
        training=(),
        test=(),
    )
