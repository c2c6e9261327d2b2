"""Collect the cases that `volseg view` shows for a run, a folder or an image."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.config.nearest import did_you_mean
from volseg.data.cases import Case, Task
from volseg.data.layouts import load_task
from volseg.data.layouts.declared import read_manifest
from volseg.data.layouts.files import list_labels
from volseg.data.layouts.pairs import detect_arrangement
from volseg.data.layouts.table import TABLES
from volseg.data.nifti import read_label_table
from volseg.data.readers import match_suffix, stem
from volseg.errors import ConfigError, DataError
from volseg.evaluation.folders import RECORD, load_label_names, strip_id
from volseg.experiment.building import choose_channel
from volseg.experiment.prediction.files import SUFFIXES, list_predicted
from volseg.experiment.prediction.predicting import resolve_images
from volseg.experiment.prediction.sources import list_runs
from volseg.experiment.prediction.trained import require_keys
from volseg.experiment.validating import choose_validated
from volseg.files import require_new
from volseg.formatting import list_some
from volseg.reporting.reading import read_scores
from volseg.reporting.viewer import ViewedCase, write_viewer

PAGE = "view.html"
VIEWING_KEYS = ("data.root", "logging.channel")


@dataclass(frozen=True, kw_only=True)
class _Shown:
    cases: Sequence[ViewedCase]
    task: Task | None = None
    channel: int = 0
    folder: Path | None = None
    """Folder of the page; None for the working folder."""


def view(
    source: str | Path,
    labels: Sequence[str | Path] = (),
    *,
    cases: Sequence[str] = (),
    channel: int | None = None,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a page that shows images with label maps over them; return its path.

    Parameters
    ----------
    source : path
        A run or a cross-validation, whose validation cases are shown, lowest Dice first; a folder of predictions; a
        data set; or images, as `resolve_images` accepts them.
    labels : sequence of path
        Further label maps: files for one image, or folders with files named after the cases.
    cases : sequence of str
        Cases to show; default all.
    channel : int, optional
        Channel of the images; default that of the run's pictures, else the first.
    overrides : sequence of str
        For a run: the present folder of its data set, ``data.root=FOLDER``.
    output : path, optional
        Path of the page; default ``view.html`` in the folder of the run or the predictions, else in the working folder.
    overwrite : bool
        Replace a page that is not in the folder of a run or of predictions.

    Raises
    ------
    ConfigError
        If there is nothing to show, the page exists, or NiiVue was not fetched.
    DataError
        If files cannot be read, or do not belong together.
    """
    source, given = Path(source), [Path(path) for path in labels]
    gathered = _gather(source, overrides)
    file = Path(output) if output is not None else (gathered.folder or Path()) / PAGE
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"the page is HTML, but {file} has another suffix; name it {PAGE}, for example")
    if output is not None or gathered.folder is None:
        require_new(file, overwrite=overwrite)
    chosen = _choose(gathered.cases, cases)
    for path in given:
        chosen = _add_layer(chosen, path)
    return write_viewer(
        chosen,
        file,
        title=source.absolute().name,
        names=gathered.task.foreground if gathered.task else _read_names(given),
        task=gathered.task,
        channel=gathered.channel if channel is None else channel,
    )


def _gather(source: Path, overrides: Sequence[str]) -> _Shown:
    if runs := list_runs(source):
        return _gather_runs(source, runs, overrides)
    if overrides:
        raise ConfigError(f"{source} is not a run and has no config, so --set {overrides[0]} does not apply")
    if (source / RECORD).is_file():
        return _gather_predictions(source)
    has_labels = source.suffix.casefold() in TABLES or (source.is_dir() and _is_data_set(source))
    task = load_task(source, require_files=False) if has_labels else None
    cases = resolve_images(source) if task is None else [*task.training, *task.test]
    return _Shown(
        cases=[_show(case, {"reference": case["label"]} if "label" in case else {}) for case in cases], task=task
    )


def _show(case: Case, layers: Mapping[str, Path], **more: Any) -> ViewedCase:
    return ViewedCase(name=case["case"], image=case["image"], layers=layers, **more)


def _is_data_set(folder: Path) -> bool:
    if read_manifest(folder) is not None:
        return True
    arrangement = detect_arrangement(folder)
    return arrangement is not None and bool(arrangement.images and arrangement.labels)


def _gather_runs(source: Path, runs: Sequence[RunFolder], overrides: Sequence[str]) -> _Shown:
    require_keys(overrides, VIEWING_KEYS)
    found = [case for run in runs for case in _list_validated(run, overrides)]
    found.sort(key=lambda case: (math.isnan(case.dice), case.dice))
    config, task = runs[0].config(overrides), runs[0].task()
    return _Shown(cases=found, task=task, channel=choose_channel(config, task), folder=source)


def _list_validated(run: RunFolder, overrides: Sequence[str]) -> Iterator[ViewedCase]:
    """Yield the validation cases; after a validation only the scored ones, as others cannot be used."""
    scores = read_scores(run.validation / "summary.json", None)
    dice = None if scores is None else {case.name: case.dice for case in scores.cases}
    for case in choose_validated(run, run.config(overrides)).validation:
        name, predicted = case["case"], run.validation / f"{case['case']}{SUFFIXES['nifti']}"
        layers = {"reference": case["label"], **({"prediction": predicted} if predicted.is_file() else {})}
        if dice is None or name in dice:
            yield _show(case, layers, dice=(dice or {}).get(name, math.nan))


def _gather_predictions(folder: Path) -> _Shown:
    files = {stem(file): file for file in list_labels(folder)}
    listed = [
        ViewedCase(name=name, image=image, layers={"prediction": files[name]})
        for name, image in sorted(list_predicted(folder).items())
        if name in files
    ]
    return _Shown(cases=listed, task=load_label_names(folder, folder), folder=folder)


def _choose(cases: Sequence[ViewedCase], names: Sequence[str]) -> list[ViewedCase]:
    known = {case.name: case for case in cases}
    if strange := [name for name in names if name not in known]:
        raise ConfigError(f"unknown case {strange[0]!r}; {did_you_mean(strange[0], known)}")
    chosen = [known[name] for name in dict.fromkeys(names)] or list(cases)
    if not chosen:
        raise ConfigError("there is no case to show; name a run, a folder of predictions, a data set or an image")
    return chosen


def _add_layer(cases: Sequence[ViewedCase], labels: Path) -> list[ViewedCase]:
    """Return the cases, each with one more label map if there is one."""
    if labels.is_dir():
        files = {strip_id(stem(file)): file for file in list_labels(labels)}
        found = {case.name: files.get(case.name, files.get(strip_id(case.name))) for case in cases}
    elif len(cases) == 1:
        files, found = {}, {cases[0].name: labels}
    else:
        raise DataError(f"{labels} is the label map of one image, but {len(cases)} images are shown; name a folder")
    if not any(found.values()):
        raise DataError(
            f"{labels} has no label map of {list_some(list(found), 3)}, only of {list_some(list(files), 3) or 'none'}"
            "; name label maps CASE.nii.gz"
        )
    title = stem(labels) if all(stem(labels) not in case.layers for case in cases) else str(labels)
    return [
        replace(case, layers={**case.layers, title: file}) if (file := found[case.name]) else case for case in cases
    ]


def _read_names(labels: Sequence[Path]) -> Mapping[int, str]:
    """Return names of values, from a header's label table or from a data set's description near the files."""
    for path in labels:
        folder = path if path.is_dir() else path.parent
        if path.is_file() and (match_suffix(path) or "").startswith(".nii") and (table := read_label_table(path)):
            return table
        if (task := load_label_names(folder, folder)) is not None:
            return task.foreground
    return {}
