"""Load trained networks from nnU-Net's folders and from exported files as the same objects as a run's."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from volseg.checkpointing.components import require_components
from volseg.checkpointing.folder import RunFolder
from volseg.config.base import validated
from volseg.config.loading import override
from volseg.config.schema import ExperimentConfig
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.archive import read_archive
from volseg.exchange.nnunet.folder import FILES, NnunetModel, read_nnunet
from volseg.exchange.nnunet.network import rename_weights
from volseg.exchange.nnunet.predictor import NnunetPredictor
from volseg.exchange.nnunet.preprocessing import build_preprocessing
from volseg.exchange.tensors import unpack_tensors
from volseg.experiment.building import preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.experiment.trained import Trained
from volseg.files import digest_file
from volseg.inference.postprocessing import Postprocessing
from volseg.models import build_network
from volseg.models.weights import load_weights

__all__ = ["NNUNET_CHECKPOINTS", "Archive", "load_archive", "load_nnunet", "open_archive"]

logger = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"

POSTPROCESSING = "postprocessing.json"

MEASURED_BY_NNUNET = "crossval_results*/postprocessing.pkl"
"""File of nnU-Net with the postprocessing that improved its scores."""

MEMBERS = ("task.json", "network.json", "components.json")
"""Files of a run folder that an archive holds unchanged for each network, if the run has them."""

NNUNET_CHECKPOINTS = {
    "latest": "checkpoint_final.pth",
    "best": "checkpoint_best.pth",
    "previous": "checkpoint_latest.pth",
}
"""A run's checkpoints, and nnU-Net's names for them."""


def load_nnunet(
    folder: str | Path,
    *,
    checkpoint: str = "checkpoint_final.pth",
    folds: Sequence[str | int] | None = None,
    overrides: Sequence[str] = (),
) -> Trained:
    """Load a model folder of nnU-Net 2, to predict as nnU-Net does.

    Parameters
    ----------
    folder : path
        With ``plans.json``, ``dataset.json`` and the folders of its folds.
    checkpoint : str
        Name of the file in each fold's folder.
    folds : sequence, optional
        Which to take; all numbered ones by default.
    overrides : sequence of str
        Such as ``inference.mirror=false``.

    Raises
    ------
    ConfigError
        For what cannot be followed: planes, cascades, other networks, trainers, schemes; named.
    CheckpointError
        For a checkpoint that is absent, damaged, unsafe to read, or of another network.
    DataError
        For plans or a ``dataset.json`` that cannot be read.
    """
    read = read_nnunet(folder, checkpoint=checkpoint, folds=folds)
    config = _describe(read, overrides)
    device = choose_device(config)
    models = []
    for file, weights in zip(read.checkpoints, read.weights, strict=True):
        with torch.device("meta"):  # only the names and shapes of its tensors matter
            plain = build_network(
                config.network.spec(), in_channels=read.task.num_channels, out_channels=read.task.num_outputs
            )
        renamed = rename_weights(weights, plain, str(file))
        model = build_model(config, read.task, device, trains=False)
        load_weights(model, renamed)
        models.append(model.eval())
    if found := sorted(read.folder.glob(MEASURED_BY_NNUNET)):
        logger.warning(
            "%s is not applied: it is a pickle, which runs code, so it is not read, and nnU-Net's predict leaves it to "
            "nnUNetv2_apply_postprocessing as well, which takes these label maps",
            found[0],
        )
    # The digest covers the plans, as the config does not describe their preprocessing.
    digests = [digest_file(file) for file in (*read.checkpoints, *(read.folder / name for name in FILES))]
    return Trained(
        source=read.folder,
        config=config,
        task=read.task,
        preprocessing=build_preprocessing(read.plan),
        models=tuple(models),
        weights=blake2b("".join(digests).encode(), digest_size=16).hexdigest(),
        mirror_axes=read.mirror_axes,
        kind=NnunetPredictor,
    )


def _describe(read: NnunetModel, overrides: Sequence[str]) -> ExperimentConfig:
    """Return a config with the values of the plans; its optimizer is never used."""
    plan = read.plan
    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "_", f"{plan.dataset}_{plan.name}").lstrip("._-") or plan.name,
        "data": {"root": str(read.folder)},
        "patch": {"size": plan.patch},
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
            f"nnU-Net predicts by windows of the patch of its plans, {list(plan.patch)}, got inference.window "
            f"{config.inference.window}; leave it out"
        )
    # nnU-Net predicts in float16 on a GPU; of what autocast offers, that has the most digits.
    if config.training.precision == "auto" and choose_device(config).type == "cuda":
        config = config.model_copy(update={"training": config.training.model_copy(update={"precision": "fp16"})})
    return config


def load_archive(file: str | Path, overrides: Sequence[str] = (), *, checkpoint: str = "latest") -> list[Trained]:
    """Load a file of `volseg export`: one network, or the networks of a cross-validation's folds.

    Parameters
    ----------
    file : path
        Of the archive.
    overrides : sequence of str
        Such as ``inference.mirror=false``.
    checkpoint : str
        Which is wanted; ``latest`` means the one that was exported.

    Raises
    ------
    CheckpointError
        If the file is damaged, was changed, or is of a version that is not known.
    ConfigError
        If it needs components that are not here, or devices.
    """
    file = Path(file)
    with open_archive(file) as archive:
        exported = str(archive.manifest.get("checkpoint"))
        if checkpoint not in ("latest", exported):
            raise ConfigError(f"{file} holds the {exported} checkpoint, not {checkpoint}; leave --checkpoint out")
        return [
            replace(_load_member(file, *network, overrides), postprocessing=archive.postprocessing)
            for network in archive.networks
        ]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An open file of `volseg export`."""

    manifest: Mapping[str, Any]
    networks: list[tuple[RunFolder, bytes]]
    """A run folder with config, task and plan, without checkpoints and cases; and the weights for `unpack_tensors`."""
    postprocessing: Postprocessing | None


@contextmanager
def open_archive(file: Path) -> Iterator[Archive]:
    """Read an archive, compare its hashes, and write its runs into a temporary folder until the block ends.

    Raises
    ------
    CheckpointError
        If the file is damaged, was changed, or is of a version that is not known.
    """
    manifest, members = read_archive(file)
    count = manifest.get("networks")
    if not isinstance(count, int) or not 1 <= count <= len(members):
        raise CheckpointError(
            f"{file}: its manifest should say how many networks it holds, got {count!r}; copy it again"
        )
    with TemporaryDirectory() as folder:
        order = None
        if (content := members.get(POSTPROCESSING)) is not None:
            (Path(folder) / POSTPROCESSING).write_bytes(content)
            order = Postprocessing.load(Path(folder) / POSTPROCESSING)
        networks = []
        for number in range(count):
            run = RunFolder(Path(folder) / str(number))
            run.path.mkdir()
            for name in (*MEMBERS, "config.yaml"):
                if (content := members.get(f"{number}/{name}")) is not None:
                    (run.path / name).write_bytes(content)
            if (content := members.get(f"{number}/{WEIGHTS}")) is None:
                raise CheckpointError(f"{file} has no {number}/{WEIGHTS}; copy it again")
            networks.append((run, content))
        yield Archive(manifest=manifest, networks=networks, postprocessing=order)


def _load_member(file: Path, run: RunFolder, weights: bytes, overrides: Sequence[str]) -> Trained:
    config, task = run.config(overrides), run.task()
    require_components(run.path, resumes=False)
    model = build_model(run.plan().complete(config), task, choose_device(config), trains=False)
    tensors = unpack_tensors(weights, f"{file}: {run.path.name}/{WEIGHTS}")
    try:
        load_weights(model, tensors)
    except CheckpointError as fault:
        raise CheckpointError(f"{file}: its weights are not of the network in its config: {fault}") from fault
    return Trained(
        source=file,
        config=config,
        task=task,
        preprocessing=preprocessing_of(config),
        models=(model.eval(),),
        weights=blake2b(weights, digest_size=16).hexdigest(),
    )
