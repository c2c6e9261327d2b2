"""Export a run or a cross-validation as one file that predicts, or one network as TorchScript, ONNX or MONAI bundle."""

import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from monai.bundle import ConfigParser
from torch import nn

from volseg.checkpointing.folder import RunFolder
from volseg.config.loading import dump_config
from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.json_files import read_json
from volseg.errors import ConfigError
from volseg.evaluation.summary import read_summary
from volseg.exchange.archive import write_archive
from volseg.exchange.formats import (
    BundleSource,
    is_monais,
    require_same_logits,
    trace,
    write_bundle,
    write_onnx,
    write_torchscript,
)
from volseg.exchange.tensors import pack_tensors
from volseg.experiment.prediction.imported import MEMBERS, POSTPROCESSING, WEIGHTS
from volseg.experiment.prediction.sources import load_trained, require_runs
from volseg.experiment.prediction.trained import Trained, open_run
from volseg.experiment.rehearsing import OneOutput
from volseg.files import name_partial, replace_nan, require_new
from volseg.inference.predictor import Predictor
from volseg.inference.window_step import full_logits
from volseg.models.fit_grid import FitGrid
from volseg.models.grids import GridRule

logger = logging.getLogger(__name__)


SUFFIXES = {"torchscript": (".pt", ".ts"), "onnx": (".onnx",)}

PLAIN = ("device=cpu", "parallel={}", "training.kernels=torch", "training.memory_format=contiguous")
"""Settings to trace a network: torch's own operators, on one device."""


def _refuse_cascade(config: ExperimentConfig, source: Path) -> None:
    if (stage := config.data.previous_stage) is not None:
        raise ConfigError(
            f"{source} is the second stage of a cascade and reads the label maps of {stage}; a cascade cannot be "
            "exported: predict with both folders"
        )


def _list_shapes(rule: GridRule, channels: int, sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes for comparison: its window, two windows, and a larger volume if the network supports one."""
    shapes = [(1, channels, *sides), (2, channels, *sides)]
    larger = tuple(side + step for side, step in zip(sides, rule.divisors, strict=True))
    return shapes if rule.fixed or not rule.takes(larger) else [*shapes, (1, channels, *larger)]


def _export_bundle(
    trained: Trained, network: OneOutput, shapes: list[tuple[int, ...]], output: Path, licence: str
) -> Path:
    config, task = trained.config, trained.task
    if output.exists():
        raise ConfigError(f"{output} exists; a MONAI bundle is written to a new folder")
    if task.regions:
        raise ConfigError(
            f"the task {task.name} has regions, which a MONAI bundle would write as channels, not as one label "
            "map; export an archive instead"
        )
    if trained.kind is not Predictor:
        raise ConfigError(f"{trained.source} predicts like nnU-Net, which MONAI does not support; use --to torchscript")
    rule, window = trained.models[0].rule, config.inference.window
    assert isinstance(rule, GridRule)
    if window is not None and not rule.takes(window):
        raise ConfigError(
            f"inference.window {list(window)} is padded to {list(rule.sides(window))} for the network, which MONAI's "
            "sliding window does not do; export an archive instead"
        )
    is_own = network.index is None and is_monais(trained.spec, network.model)
    bundle = BundleSource(
        name=task.name,
        network=network.model,
        spec=trained.spec,
        script=None if is_own else trace(network, shapes),
        channels=task.modalities,
        labels=dict(sorted(task.labels.items())),
        preprocessing=[component.spec() for component in config.preprocessing],
        window=window,
        overlap=config.inference.overlap,
        multiple=rule.divisors,
        minimum=rule.sides((1, 1, 1)),
        licence=licence,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = name_partial(output)
    partial.mkdir()
    try:
        write_bundle(bundle, partial)
        _require_same(partial, network, shapes)
        os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _require_same(folder: Path, network: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Raise unless the network that MONAI builds from the bundle returns the same logits."""
    parser = ConfigParser()
    parser.read_config(str(folder / "configs" / "inference.json"))
    parser["bundle_root"], parser["device"] = str(folder), "$torch.device('cpu')"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of TorchScript, which bundles use
        built: Any = parser.get_parsed_content("network")
    require_same_logits(network, lambda image: full_logits(built(image)), shapes, "MONAI bundle")


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
    source : path
        A run folder, or the folder of a cross-validation, whose finished folds become an ensemble.
    output : path
        Path of the file, replaced only as a whole; for ``monai-bundle`` a new folder.
    to : str
        One of `FORMATS`. All but ``archive`` store one network; a file is kept only if its output agrees.
    checkpoint : str
        ``latest``, ``best`` or ``previous``.
    licence : str
        Licence of the weights, such as ``CC-BY-4.0``.
    overwrite : bool
        Whether to replace an existing file.

    Raises
    ------
    ConfigError
        If the network cannot be written in this format, if the file exists and ``overwrite`` is off, or if ``source``
        is neither a run nor a cross-validation.
    CheckpointError
        If a checkpoint cannot be used.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to must be one of {', '.join(FORMATS)}, got {to!r}; {did_you_mean(to, FORMATS)}")
    source, output = Path(source), Path(output)
    if to != "monai-bundle" and not output.is_dir():  # a folder is refused below
        require_new(output, overwrite=overwrite)
    if to == "archive":
        return _export_archive(source, output, checkpoint, licence)
    if to in SUFFIXES and (output.suffix not in SUFFIXES[to] or output.is_dir()):
        raise ConfigError(f"--to {to} needs a file name that ends in {' or '.join(SUFFIXES[to])}, got {output}")
    trained = load_trained(source, checkpoint, PLAIN)
    _refuse_cascade(trained.config, source)
    if len(trained.models) > 1:
        raise ConfigError(
            f"{source} contains {len(trained.models)} networks, but {to} can store one; name one fold, such as "
            f"{source / 'fold_0'}"
        )
    fitted = trained.models[0]
    assert isinstance(fitted, FitGrid)
    shape = fitted.rule.sides(trained.config.inference.window or trained.config.patch.size)
    outputs = trained.config.network.outputs
    network = OneOutput(fitted.net, None if len(outputs) == 1 else outputs.index("logits")).eval()
    shapes = _list_shapes(fitted.rule, trained.task.num_inputs, shape)
    if trained.config.inference.mirror:
        logger.warning("the run averages over mirrored volumes, but %s contains only the network", output)
    if names := trained.config.inference.keep_largest:
        logger.warning("the run keeps only the largest component of %s, but %s does not", ", ".join(names), output)
    if to == "torchscript":
        return write_torchscript(network, shapes, output)
    if to == "onnx":
        return write_onnx(network, shapes, output)
    return _export_bundle(trained, network, shapes, output, licence)


def _export_archive(source: Path, output: Path, checkpoint: str, licence: str) -> Path:
    """Write a run, or the finished folds of a cross-validation, as one file.

    The weights are those of a prediction (averaged weights if the training kept them). Data about people or machines
    are omitted: the cases' names, paths, the environment.
    """
    if output.is_dir() or output.suffix != ".zip":
        raise ConfigError(f"an archive needs a file name such as model.zip, got {output}")
    runs = require_runs(source)
    _refuse_cascade(runs[0].config(), source)
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
    }
    order = RunFolder(source).postprocessing_file
    if order.is_file() and checkpoint == "latest":  # it was measured with these label maps
        kept = {key: value for key, value in read_json(order).items() if key != "cases"}  # names of patients
        members[POSTPROCESSING] = json.dumps(kept, indent=1).encode()
    return write_archive(output, about, members)


def _list_members(run: RunFolder, checkpoint: str) -> dict[str, bytes]:
    network = open_run(run, checkpoint, PLAIN).build().models[0]  # only a network that can predict is exported
    members = {name: (run.path / name).read_bytes() for name in MEMBERS if (run.path / name).is_file()}
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        dump_config(_without_places(run.config()), config)
        members["config.yaml"] = config.read_bytes()
    members[WEIGHTS] = pack_tensors(network.state_dict())
    return members


def _without_places(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config without paths of the machine that trained it."""
    config = config.model_copy(update={"output": None})
    return config.with_values(
        data={"root": Path(), "cache": "auto"}, split={"file": None}, training={"start_from": None}
    )


def _read_scores(run: RunFolder) -> dict[str, Any] | None:
    """Return means of the validation, without its cases, or None if the run was never validated."""
    file = run.validation / "summary.json"
    if not file.is_file():
        return None
    summary = read_summary(file)
    return replace_nan({"cases": len(summary["metric_per_case"]), "mean": summary["mean"]})
