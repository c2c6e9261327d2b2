"""Open networks of nnU-Net's folders and of exported files, as the same objects as those of a run."""

import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from volseg.checkpointing.file import parse_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.config.base import validated
from volseg.config.loading import override
from volseg.config.schema import ExperimentConfig
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.archive import read_archive
from volseg.exchange.nnunet.folder import FILES, NnunetModel, parse_nnunet, read_alone
from volseg.exchange.nnunet.network import rename_weights
from volseg.exchange.nnunet.predictor import NnunetPredictor, build_preprocessing
from volseg.exchange.tensors import read_torch_file, unpack_tensors
from volseg.experiment.network_plan import NetworkPlan
from volseg.experiment.placement.placed_network import choose_device
from volseg.experiment.prediction.trained import SourceNetwork
from volseg.files import digest_file
from volseg.inference.postprocessing import Postprocessing
from volseg.models.networks import build_network

logger = logging.getLogger(__name__)


WEIGHTS = "weights.safetensors"

POSTPROCESSING = "postprocessing.json"

MEASURED_BY_NNUNET = "crossval_results*/postprocessing.pkl"
"""File of nnU-Net with the postprocessing that improved its scores."""

MEMBERS = ("task.json", "network.json", "components.json")
"""Files of a run folder that an archive contains unchanged for each network, if the run has them."""

NNUNET_CHECKPOINTS = {
    "latest": "checkpoint_final.pth",
    "best": "checkpoint_best.pth",
    "previous": "checkpoint_latest.pth",
}
"""A run's checkpoints, and nnU-Net's names for them."""


def open_nnunet(read: NnunetModel, overrides: Sequence[str] = ()) -> Iterator[SourceNetwork]:
    """Yield the folds of a model of nnU-Net 2, which predict as nnU-Net does.

    Parameters
    ----------
    read : NnunetModel
        A model folder, or a checkpoint from one.
    overrides : sequence of str
        Such as ``inference.mirror=false``.

    Raises
    ------
    ConfigError
        For an override that nnU-Net's prediction does not have.
    CheckpointError
        For weights of another network than the plans'.
    """
    config, preprocessing = _describe(read, overrides), build_preprocessing(read.plan)
    for found in sorted(read.folder.glob(MEASURED_BY_NNUNET))[:1]:
        logger.warning(
            "%s is not applied: it is a pickle, which can run code, and nnU-Net's predict does not apply it either; "
            "use nnUNetv2_apply_postprocessing on these label maps",
            found,
        )
    with torch.device("meta"):  # only the names and shapes of its tensors matter
        plain = build_network(
            config.network.spec(), in_channels=read.task.num_inputs, out_channels=read.task.num_outputs
        )
    beside = [] if read.folder.is_file() else [read.folder / name for name in FILES]
    for file, fold, weights in zip(read.checkpoints, read.folds, read.weights, strict=True):
        # The digest covers the plans, as the config does not describe their preprocessing.
        digests = "".join(digest_file(one) for one in (file, *beside))
        yield SourceNetwork(
            source=read.folder if read.folder == file else read.folder / f"fold_{fold}",
            file=file,
            values=rename_weights(weights, plain, str(file)),
            written=weights,
            digest=blake2b(digests.encode(), digest_size=16).hexdigest(),
            config=config,
            task=read.task,
            plan=NetworkPlan(spacing=read.plan.spacing),
            preprocessing=preprocessing,
            axcodes="".join("SAR"[axis] for axis in read.plan.transpose),
            mirror_axes=read.mirror_axes,
            kind=NnunetPredictor,
        )


def _describe(read: NnunetModel, overrides: Sequence[str]) -> ExperimentConfig:
    """Return a config with the values of the plans; its optimizer is never used."""
    plan = read.plan
    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "_", f"{plan.dataset}_{plan.name}").lstrip("._-") or plan.name,
        "data": {"root": str(read.folder)},
        "patch": {"size": plan.patch, "batch": plan.batch},
        "network": dict(plan.network),
        "optimizer": {"name": "SGD", "lr": 0.01},
        "preprocessing": [],
        "inference": {"window": plan.patch, "overlap": 0.5, "mirror": bool(read.mirror_axes)},
    }
    for assignment in overrides:
        values = override(values, assignment)
    config = validated(ExperimentConfig, values, str(read.folder))
    if config.inference.window != plan.patch:
        raise ConfigError(
            f"nnU-Net predicts with windows of its plans' patch size, {list(plan.patch)}, got inference.window "
            f"{config.inference.window}; leave inference.window out"
        )
    # nnU-Net predicts in float16 on a GPU; of autocast's types, it has the most digits.
    if config.training.precision == "auto" and choose_device(config).type == "cuda":
        config = config.with_values(training={"precision": "fp16"})
    return config


def open_archive(
    file: Path, overrides: Sequence[str] = (), *, checkpoint: str = "latest", fold: str | None = None
) -> Iterator[SourceNetwork]:
    """Yield the networks in a file of `volseg export`: one, or those of a cross-validation's folds.

    A network must be built before the next one is requested: its run folder is temporary.

    Parameters
    ----------
    file : path
        Path of the archive.
    overrides : sequence of str
        Such as ``inference.mirror=false``.
    checkpoint : str
        Checkpoint to use; ``latest`` means the exported one.
    fold : str, optional
        Such as ``fold_2``: only this one.

    Raises
    ------
    CheckpointError
        If the file is damaged, was changed, or has an unknown version.
    ConfigError
        If it contains another checkpoint, or no such fold.
    """
    manifest, members = read_archive(file)
    count, exported = manifest.get("networks"), str(manifest.get("checkpoint"))
    if not isinstance(count, int) or not 1 <= count <= len(members):
        raise CheckpointError(
            f"the manifest of {file} should state the number of networks, got {count!r}; copy the file again"
        )
    if checkpoint not in ("latest", exported):
        raise ConfigError(f"{file} contains the {exported} checkpoint, not {checkpoint}; leave out --checkpoint")
    folds = _name_folds(manifest.get("folds"), count)
    if fold is not None and fold not in folds:
        raise ConfigError(f"{file} has no {fold}; it has {', '.join(folds) or 'one network and no folds'}")
    with TemporaryDirectory() as folder:
        order = None
        if (content := members.get(POSTPROCESSING)) is not None:
            (Path(folder) / POSTPROCESSING).write_bytes(content)
            order = Postprocessing.load(Path(folder) / POSTPROCESSING)
        for number, name in enumerate(folds or [""]):
            if (weights := members.get(f"{number}/{WEIGHTS}")) is None:
                raise CheckpointError(f"{file} has no {number}/{WEIGHTS}; copy it again")
            if fold not in (None, name):
                continue
            run = RunFolder(Path(folder) / str(number))
            run.path.mkdir()
            for part in (*MEMBERS, "config.yaml"):
                if (content := members.get(f"{number}/{part}")) is not None:
                    (run.path / part).write_bytes(content)
            yield SourceNetwork(
                source=file / name if name else file,
                file=file,
                values=unpack_tensors(weights, f"{file}: {number}/{WEIGHTS}"),
                digest=blake2b(weights, digest_size=16).hexdigest(),
                config=run.config(overrides),
                task=run.task(),
                plan=run.plan(),
                run=run,
                postprocessing=order if fold is None else None,  # measured with all folds
            )


def _name_folds(named: Any, count: int) -> list[str]:
    """Return the names of an archive's folds; none for a run that was not part of a cross-validation."""
    if isinstance(named, list) and len({*map(str, named)}) == count:
        return [str(name) for name in named]
    return [f"fold_{number}" for number in range(count)] if count > 1 else []


# Open files of weights: checkpoints outside of their run, nnU-Net's, safetensors, and any ``state_dict``.
#
# Each kind of file has one reader, which compares checksums before it reads a value, if the file has any. If that
# reader refuses a file, no other reader tries it.


SUFFIXES = (".pt", ".pth", ".ckpt", ".tar", ".bin", ".ts", ".safetensors")
"""Suffixes of files with weights; a file of ``torch.save`` may have another suffix."""

CONTAINERS = ("state_dict", "network_weights", "model", "model_state_dict")
"""Keys under which other programs store a ``state_dict``: Lightning, nnU-Net, and many scripts."""


def locate_weights(path: Path) -> Path | None:
    """Return the weights file of a path, which may be a MONAI bundle; None if there is none."""
    if (path / "configs").is_dir() and (path / "models").is_dir():
        candidates = [path / "models" / name for name in ("model.pt", "model.ts")]
        return next((file for file in candidates if file.is_file()), None)
    return path if path.is_file() and (path.suffix.lower() in SUFFIXES or _is_zip(path)) else None


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # the reader reports the damage
        return True


def open_weights(file: Path, overrides: Sequence[str] = ()) -> Iterator[SourceNetwork]:
    """Yield the network of a file; only a checkpoint of nnU-Net describes its network.

    Raises
    ------
    CheckpointError
        If the file is damaged, contains no weights, or cannot be read without running code.
    """
    weights = SourceNetwork(source=file, file=file, values={}, digest=digest_file(file))
    if file.suffix.lower() == ".safetensors":  # it carries no checksum, so start.json keeps its digest
        values = unpack_tensors(file.read_bytes(), str(file))
        if not values:
            raise CheckpointError(f"{file} contains no weights; name another file")
        yield replace(weights, values=values)
        return
    content = read_torch_file(file)
    if (state := parse_checkpoint(content, file)) is not None:
        yield replace(weights, values=state.model, average=state.averaged)
        return
    unknown = weights.unknown
    if isinstance(content, Mapping) and {"network_weights", "init_args", "trainer_name"} <= content.keys():
        try:
            yield from open_nnunet(read_alone(file, parse_nnunet(content, file)), overrides)
            return
        except ConfigError as fault:  # a custom network may use these weights under their own names
            unknown = str(fault)
    yield replace(weights, values=_find_state_dict(content, file), unknown=unknown)


def _find_state_dict(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the ``state_dict`` in a file of another program."""
    for _ in CONTAINERS:  # one may contain another, and a damaged one may contain itself
        found = [key for key in CONTAINERS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
        if not found:
            break
        if len(found) > 1:
            raise CheckpointError(
                f"{path} contains weights under {' and '.join(found)}; save only one of them: "
                "torch.save(network.state_dict(), FILE)"
            )
        content = content[found[0]]
    if not (
        isinstance(content, Mapping)
        and all(isinstance(name, str) for name in content)
        and any(isinstance(value, Tensor) for value in content.values())
    ):
        raise CheckpointError(f"{path} contains no state_dict (names and their tensors); name another file")
    return content
