"""Resolve a source: a run, the folds of a cross-validation, several of them, or a model of another program.

`predict`, `export`, `validate`, ``training.start_from`` and `volseg.load` resolve their sources here.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.archive import is_archive
from volseg.exchange.nnunet.folder import locate_nnunet, read_nnunet
from volseg.experiment.prediction.imported import (
    NNUNET_CHECKPOINTS,
    locate_weights,
    open_archive,
    open_nnunet,
    open_weights,
)
from volseg.experiment.prediction.trained import SourceNetwork, Trained, open_run, require_checkpoint, require_keys
from volseg.experiment.several_runs import load_final_state
from volseg.inference.postprocessing import Postprocessing
from volseg.monitoring.run_files import list_numbered

logger = logging.getLogger(__name__)

Source = str | Path | RunFolder
"""Types that `open_source` accepts."""


def load_trained(
    source: Source | Sequence[Source], checkpoint: str = "latest", overrides: Sequence[str] = ()
) -> Trained:
    """Load the networks for a prediction; the probabilities of several networks are averaged.

    Parameters
    ----------
    source : path, RunFolder, or sequence of them
        A source for `open_source`, or several sources.
    checkpoint : str
        ``latest`` (the end of the training), ``best`` or ``previous``.
    overrides : sequence of str
        Such as ``inference.mirror=false``; see `PREDICTION_KEYS`.

    Raises
    ------
    ConfigError
        If a source is invalid, a key may not be overridden, or several sources do not fit together.
    CheckpointError
        If a checkpoint is absent, damaged, or of another network.
    """
    require_keys(overrides)
    named: list[Any] = list(source) if isinstance(source, tuple | list) else [source]
    if not named or not all(isinstance(one, Source) for one in named):
        raise ConfigError(f"source should be a path, a RunFolder or a list of these, got {source!r}")
    loaded = [network.build() for one in named for network in open_source(one, checkpoint, overrides)]
    if len(loaded) == 1:
        return replace(loaded[0], source=path_of(named[0]))
    joined = _join(loaded, path_of(named[0]))
    return joined if len(named) == 1 else replace(joined, postprocessing=None)  # no measurement covers these together


def list_folds(folder: Path) -> list[RunFolder]:
    """Return the finished folds of a cross-validation, in order; none if the folder has no folds.

    Unfinished folds are left out and logged.

    Raises
    ------
    ConfigError
        If there are folds and none is finished.
    """
    begun = {number: run for number, path in list_numbered(folder).items() if (run := RunFolder(path)).exists}
    finished = [number for number, run in begun.items() if load_final_state(run, run.config()) is not None]
    left = [str(number) for number in begun if number not in finished]
    if begun and not finished:
        raise ConfigError(
            f"no fold of {folder} is finished (started: {', '.join(left)}); continue with volseg cross-validate "
            f"CONFIG --resume, or name one of its run folders, such as {begun[int(left[0])].path}"
        )
    if begun:
        config = begun[finished[0]].config().split
        of = "" if config.file else f" of {config.num_folds}"
        logger.info("%s: ensemble of fold(s) %s%s", folder, ", ".join(map(str, finished)), of)
    if left:
        logger.warning("%s: unfinished fold(s) %s are not used", folder, ", ".join(left))
    return [begun[number] for number in finished]


def path_of(source: Source) -> Path:
    """Return the path of a source."""
    return source.path if isinstance(source, RunFolder) else Path(source)


def list_runs(source: Source) -> list[RunFolder]:
    """Return the run at a path, or the finished folds of a cross-validation; none for another path.

    Raises
    ------
    ConfigError
        If there are folds and none is finished.
    """
    path = path_of(source)
    return [RunFolder(path)] if RunFolder(path).exists or isinstance(source, RunFolder) else list_folds(path)


def require_runs(source: str | Path) -> list[RunFolder]:
    """Return the run at a path, or the finished folds of a cross-validation.

    Raises
    ------
    ConfigError
        If the path is neither, or no fold is finished.
    """
    if runs := list_runs(source):
        return runs
    raise ConfigError(
        f"{source} is neither a run folder nor a cross-validation: it has no config.yaml and no fold_0; name the "
        "folder that `volseg train` or `volseg cross-validate` wrote"
    )


def open_source(source: Source, checkpoint: str = "latest", overrides: Sequence[str] = ()) -> Iterator[SourceNetwork]:
    """Yield the networks of a source; build each network before requesting the next.

    Parameters
    ----------
    source : path or RunFolder
        A run folder; the folder of a cross-validation, with all its finished folds; a file of `volseg export`; a model
        folder of nnU-Net 2; a fold of these (``FOLDER/fold_1``, ``model.zip/fold_1``); a checkpoint of a run or of
        nnU-Net 2; or weights only: ``.safetensors``, a file with a ``state_dict``, a MONAI bundle.
    checkpoint : str
        A key of `CHECKPOINTS`.
    overrides : sequence of str
        Such as ``inference.mirror=false``.

    Raises
    ------
    ConfigError
        If the source is none of these.
    CheckpointError
        If weights are absent or damaged.
    """
    require_checkpoint(checkpoint)
    path = path_of(source)
    if checkpoint != "latest" and path.is_file() and not is_archive(path):
        raise ConfigError(f"{path} is one file of weights; name its folder to use the {checkpoint} checkpoint")
    around = RunFolder(path.absolute().parent.parent)
    if runs := list_runs(source):
        order = _find_postprocessing(path, checkpoint)
        for run in runs:
            yield replace(open_run(run, checkpoint, overrides), postprocessing=order)
    elif path.is_file() and around.exists and path.absolute().parent == around.checkpoints:
        yield open_run(around, path, overrides)
    elif (found := locate_nnunet(path, NNUNET_CHECKPOINTS[checkpoint])) is not None:
        folder, name, folds = found
        yield from open_nnunet(read_nnunet(folder, checkpoint=name, folds=folds), overrides)
    elif is_archive(path):
        yield from open_archive(path, overrides, checkpoint=checkpoint)
    elif path.name.startswith("fold_") and is_archive(path.parent):
        yield from open_archive(path.parent, overrides, checkpoint=checkpoint, fold=path.name)
    elif (file := locate_weights(path)) is not None:
        yield from open_weights(file, overrides)
    else:
        raise ConfigError(
            f"{path} {'is not a model' if path.exists() else 'does not exist'}; name a run folder of volseg train, the "
            "folder of a cross-validation, a file of volseg export, a model folder of nnU-Net 2 (with plans.json), or "
            "a file of weights"
        )


def open_one(path: str | Path) -> SourceNetwork:
    """Return the one network of a source.

    Raises
    ------
    ConfigError
        If ``path`` is not a source, or one of several networks.
    CheckpointError
        If the weights are damaged, or cannot be read without running code.
    """
    networks = open_source(path)
    first = next(networks)
    if (second := next(networks, None)) is not None:
        raise ConfigError(f"{path} contains more than one network; name one of them: {first.source} or {second.source}")
    return first


def read_weights(path: Path) -> SourceNetwork:
    """Return the network of a training's initial weights; the errors of `open_one` name the config's key."""
    try:
        return open_one(path)
    except (CheckpointError, ConfigError) as fault:
        raise type(fault)(f"training.start_from: {fault}") from fault


def _find_postprocessing(path: Path, checkpoint: str) -> Postprocessing | None:
    """Return the measured postprocessing of a run, or of all folds together."""
    file = RunFolder(path).postprocessing_file
    if not file.exists():
        return None
    if checkpoint != "latest":
        logger.info("%s is not applied: it was measured with the latest checkpoint's label maps", file)
        return None
    return Postprocessing.load(file)


def _join(members: Sequence[Trained], source: Path) -> Trained:
    """Join networks into an ensemble; all must have one task and read the same images.

    Raises
    ------
    ConfigError
        If they differ, with the difference, the two networks, and whether the value can be set.
    """
    first = members[0]
    own, *others = ({**member.settings, "previous stage": member.config.data.previous_stage} for member in members)
    for other, theirs in zip(members[1:], others, strict=True):
        if differing := [f"{key} ({value} and {theirs[key]})" for key, value in own.items() if value != theirs[key]]:
            raise ConfigError(
                f"{first.source} and {other.source} cannot predict together, as they differ in "
                f"{'; '.join(differing)}. Networks of one ensemble share task and preprocessing; inference and "
                "precision can be set for all with --set"
            )
    weights = blake2b("".join(member.weights for member in members).encode(), digest_size=16).hexdigest()
    models = tuple(model for member in members for model in member.models)
    return replace(first, source=source, models=models, weights=weights)
