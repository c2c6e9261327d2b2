"""A run, or a cross-validation, as one file that predicts without its folder, its data or its cache."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.config.loading import dump_config
from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.json_files import read_json
from volseg.errors import ConfigError
from volseg.evaluation.summary import read_summary
from volseg.exchange.archive import write_archive
from volseg.exchange.tensors import pack_tensors
from volseg.experiment.exported_network import PLAIN, export_network
from volseg.experiment.imported import MEMBERS, POSTPROCESSING, WEIGHTS
from volseg.experiment.sources import require_runs
from volseg.experiment.trained import open_run
from volseg.files import digest_file, require_new
from volseg.monitoring.run_files import replace_nan

__all__ = ["FORMATS", "export", "export_archive"]

FORMATS = ("archive", "torchscript", "onnx", "monai-bundle")


def export(
    source: str | Path,
    output: str | Path,
    *,
    to: str = "archive",
    checkpoint: str = "latest",
    licence: str = "not stated",
    overwrite: bool = False,
) -> Path:
    """Write a trained network as one file, or for other programs.

    Parameters
    ----------
    source, output, checkpoint, licence
        As for `export_archive`; with ``monai-bundle`` the output is a folder, which is new.
    to : str
        One of `FORMATS`. But for an archive: one network, run and compared with the file before that is kept.
    overwrite : bool
        Whether a file that is there is replaced.

    Raises
    ------
    ConfigError
        If the network cannot be written in this format, says why; if there is such a file, and ``overwrite`` is off.
    CheckpointError
        If a checkpoint cannot be used.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to takes {', '.join(FORMATS)}, got {to!r}; {did_you_mean(to, FORMATS)}")
    if to != "monai-bundle" and not Path(output).is_dir():  # a folder is refused with a reason of its own
        require_new(output, overwrite=overwrite)
    if to == "archive":
        return export_archive(source, output, checkpoint=checkpoint, licence=licence)
    return export_network(Path(source), Path(output), to=to, checkpoint=checkpoint, licence=licence)


def export_archive(
    source: str | Path, output: str | Path, *, checkpoint: str = "latest", licence: str = "not stated"
) -> Path:
    """Write a run, or the finished folds of a cross-validation, as one file.

    The weights are those that a prediction takes (averaged ones where the training kept them). What tells of people or
    machines stays behind: the cases' names, paths, the environment.

    Parameters
    ----------
    source : path
        A run folder, or that of a cross-validation, whose finished folds become an ensemble.
    output : path
        Of the file; replaced only as a whole.
    checkpoint : str
        ``latest``, ``best`` or ``previous``.
    licence : str
        Under which the weights may be used, such as ``CC-BY-4.0``.

    Raises
    ------
    ConfigError
        If ``source`` is neither, or ``output`` lies where nothing can be written.
    CheckpointError
        If a checkpoint cannot be used.
    """
    source, output = Path(source), Path(output)
    if output.is_dir() or output.suffix != ".zip":
        raise ConfigError(f"a run is exported to a file such as model.zip, got {output}")
    runs = require_runs(source)
    members: dict[str, bytes] = {}
    scores = []
    for number, run in enumerate(runs):
        members |= {f"{number}/{name}": content for name, content in _list_members(run, checkpoint).items()}
        scores.append(_read_scores(run))
    about = {
        "name": runs[0].config().name,
        "networks": len(runs),
        **({} if RunFolder(source).exists else {"folds": [run.path.name for run in runs]}),
        "checkpoint": checkpoint,
        "licence": licence,
        "scores": scores,
        "data": [_digest_cases(run) for run in runs],
    }
    order = RunFolder(source).postprocessing_file
    if order.is_file() and checkpoint == "latest":  # whose label maps it was measured with
        members[POSTPROCESSING] = order.read_bytes()
    return write_archive(output, about, members)


def _list_members(run: RunFolder, checkpoint: str) -> dict[str, bytes]:
    network = open_run(run, checkpoint, PLAIN).build().models[0]  # what cannot be predicted with is not exported
    members = {name: (run.path / name).read_bytes() for name in MEMBERS if (run.path / name).is_file()}
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        dump_config(_without_places(run.config()), config)
        members["config.yaml"] = config.read_bytes()
    members[WEIGHTS] = pack_tensors(network.state_dict())
    return members


def _without_places(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config without where things lay on the machine of the training."""
    data = config.data.model_copy(update={"root": Path(), "cache": "auto"})
    split = config.split.model_copy(update={"file": None})
    training = config.training.model_copy(update={"start_from": None})
    return config.model_copy(update={"output": None, "data": data, "split": split, "training": training})


def _read_scores(run: RunFolder) -> dict[str, Any] | None:
    """Return means of the validation, without its cases; None of a run that was never validated."""
    file = run.validation / "summary.json"
    if not file.is_file():
        return None
    summary = read_summary(file)
    means = {str(structure): dict(metrics) for structure, metrics in summary["mean"].items()}
    content = {
        "cases": len(summary["metric_per_case"]),
        "foreground_mean": dict(summary["foreground_mean"]),
        "mean": means,
    }
    return replace_nan(content)


def _digest_cases(run: RunFolder) -> str | None:
    """Return a digest of the voxels that were trained on, which says nothing else of them."""
    file = run.path / "cases.json"
    if not file.is_file():
        return None
    read_json(file)  # a damaged one is no fingerprint
    return digest_file(file)
