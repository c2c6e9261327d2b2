"""Predict label maps for new images, in this process or in a worker for each GPU."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python

from volseg.checkpointing.folder import RunFolder
from volseg.data.cases import Case
from volseg.data.dicom.elements import is_dicom
from volseg.data.dicom.series import FoundSeries, choose_series, gather_series, name_series, search_series
from volseg.data.labels import format_colour_tables
from volseg.data.layouts.files import list_images
from volseg.data.layouts.naming import group_channels, name_image
from volseg.data.layouts.table import TABLES, read_images
from volseg.data.readers import list_files, match_suffix, name_files
from volseg.errors import ConfigError, DataError
from volseg.experiment.cases import find_previous_stage
from volseg.experiment.launching import choose_gpus
from volseg.experiment.prediction.files import CaseResult, Predicted, PredictionFiles, PredictionRecord
from volseg.experiment.prediction.queue import PredictionQueue
from volseg.experiment.prediction.sources import Source, load_trained, path_of
from volseg.experiment.prediction.trained import Trained
from volseg.files import name_partial, replacing, require_text
from volseg.formatting import list_duplicates, list_some
from volseg.monitoring.progress import count_up
from volseg.parallel.processes.workers import Channel, open_channel

logger = logging.getLogger(__name__)


def predict(
    source: Source | Sequence[Source],
    images: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    checkpoint: str = "latest",
    overrides: Sequence[str] = (),
    series: Sequence[str] = (),
    resume: bool = False,
    skip_existing: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    gpus: int | None = None,
    postprocessing: bool = True,
    probabilities: bool = False,
    uncertainty: bool = False,
    label_format: str = "nifti",
    colour_tables: bool = False,
) -> Predicted:
    """Predict images and write each label map as ``CASE.nii.gz`` on its image's own grid.

    A case that fails (a damaged file, a volume that does not fit) is reported, and the others continue.

    Parameters
    ----------
    source : path, RunFolder, or sequence of them
        Trained networks; see `load_trained`.
    images : path, or sequence of them
        Files, folders of files, DICOM folders and folders above them, or tables; see `resolve_images`.
    output : path, optional
        Folder for the label maps; ``predictions`` in the folder of the run or the cross-validation by default.
    checkpoint : str
        ``latest`` (the end of the training, as nnU-Net does), ``best`` or ``previous``.
    overrides : sequence of str
        Such as ``inference.mirror=false``.
    series : sequence of str
        DICOM series to predict, by UID or by a part of their description; see `resolve_images`.
    resume : bool
        Resume an interrupted prediction: complete label maps are kept.
    skip_existing : bool
        Skip cases whose label map file exists, whatever its content.
    overwrite : bool
        Replace existing label maps. If there are any, one of these three is required.
    strict : bool
        Read every image before the first prediction, and raise for unusable ones; then raise at the first failure.
    gpus : int, optional
        Number of GPUs to predict on (with ``device=cpu`` among the overrides, that many processes on the CPU): one
        process for each, or, with fewer cases than GPUs, each case cut over all of them.
    postprocessing : bool
        Apply the measured steps of `determine_postprocessing`, if there are any.
    probabilities, uncertainty : bool
        Also write these; see `volseg.experiment.prediction.files`.
    label_format : str
        Format of label maps: ``nifti`` or ``dicom-seg``.
    colour_tables : bool
        Write names and colours of the labels next to the label maps; see `format_colour_tables`.

    Raises
    ------
    DataError
        For images that are absent or share a name; if ``strict``, for all bad images at once.
    ConfigError
        If the source cannot predict, label maps cannot be written or exist, or those of a resumed prediction have
        other settings.
    """
    if sum((resume, skip_existing, overwrite)) > 1:
        raise ConfigError("--resume, --skip-existing and --overwrite exclude each other; use one of them")
    order: dict[str, Any] = {
        "source": list(source) if isinstance(source, tuple | list) else [source],
        "output": output,
        "checkpoint": checkpoint,
        "overrides": list(overrides),
        "asked": {"label_format": label_format, "probabilities": probabilities, "uncertainty": uncertainty},
        "postprocessing": postprocessing,
    }
    trained, files, record = _load(order)
    cases = resolve_images(images, trained.task.modalities, series=series)
    _refuse_own_images(cases, files)
    _require_writable(cases, files)
    done = record.list_done(cases) if resume else record.list_existing(cases)
    if done and not (resume or skip_existing or overwrite):
        raise ConfigError(
            f"{files.folder} contains {len(done)} of the {len(cases)} label maps, first {next(iter(done))}. Continue "
            "this prediction with --resume, keep label maps of any origin with --skip-existing, replace them with "
            "--overwrite, or name another folder with --output"
        )
    done = {} if overwrite else done
    waiting = [case for case in cases if case["case"] not in done]
    stage = find_previous_stage(trained.config) if waiting else None
    devices = () if gpus is None else choose_gpus(trained.config, gpus)
    cut_over = _choose_devices(devices, waiting, trained)
    queue = PredictionQueue(trained, files, record, waiting, strict=strict, devices=cut_over)
    if stage is not None:
        logger.info("%s predicts the images first", stage)
        predict(
            stage,
            images,
            files.stage_folder,
            overrides=[setting for setting in overrides if setting.startswith("device")],
            series=series,
            resume=resume or skip_existing,  # a label map of another image or network would be an input of this one
            overwrite=overwrite,
            strict=strict,
            gpus=gpus,
            postprocessing=False,
        )
    if strict:
        queue.require_sound()
    record.begin()
    results = {name: CaseResult(case=name, state="there before", file=path) for name, path in done.items()}
    for_worker = {**order, "source": [str(path_of(one)) for one in order["source"]], "output": str(files.folder)}
    for_worker["made_by"] = record.digest
    with count_up(len(cases), "predicting", done=len(done)) as count:
        results |= queue.run(count, () if cut_over else devices, for_worker)
    record.write_volumes()
    for name, text in format_colour_tables(trained.task.foreground).items() if colour_tables else ():
        with replacing(files.folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return Predicted(folder=files.folder, cases=tuple(results[case["case"]] for case in cases))


def _load(order: Mapping[str, Any]) -> tuple[Trained, PredictionFiles, PredictionRecord]:
    """Return the trained networks, the files to write, and their record."""
    trained = load_trained(order["source"], order["checkpoint"], order["overrides"])  # first: its errors help most
    files = PredictionFiles(
        folder=_choose_folder(order["source"], order["output"]),
        postprocessing=trained.postprocessing if order["postprocessing"] else None,
        **order["asked"],
    )
    return trained, files, PredictionRecord(files, trained, order["checkpoint"])


def _choose_devices(gpus: Sequence[str | None], waiting: Sequence[Case], trained: Trained) -> tuple[torch.device, ...]:
    """Return the devices over which each case is cut: all if there are fewer cases than GPUs, otherwise none."""
    if not 1 <= len(waiting) < len(gpus) or trained.config.inference.window is None:
        return ()
    logger.info("%d case(s) on %d GPUs: each is cut over all of them", len(waiting), len(gpus))
    on_gpus = gpus[0] is not None
    return tuple(torch.device("cuda", number) if on_gpus else torch.device("cpu") for number in range(len(gpus)))


def serve_predictions() -> None:
    """Predict the cases that the parent process sends; see `predict_in_processes`."""
    channel = open_channel()
    order = channel.receive()
    try:
        trained, files, record = _load(order)
        if record.digest != order["made_by"]:
            raise ConfigError(
                "a running training replaced the weights while the prediction started; wait until it ends, or choose "
                "other weights with --checkpoint; --overwrite predicts all images again"
            )
        queue = PredictionQueue(trained, files, record, (), strict=False)
        for result in queue.predict_each(_ask_for_cases(channel)):
            channel.send(to_jsonable_python(result))
    except ConfigError as fault:
        channel.send({"ends": str(fault)})
        raise


def _ask_for_cases(channel: Channel) -> Iterator[Case]:
    while True:
        channel.send({"asks": True})
        if (case := channel.receive()) is None:
            return
        files = tuple(map(Path, case["image"]))
        yield {"case": case["case"], "image": files[0] if len(files) == 1 else files}


def _choose_folder(named: Sequence[Source], output: str | Path | None) -> Path:
    """Return the folder for label maps."""
    if output is not None:
        return Path(output)
    path = path_of(named[0])
    if len(named) == 1 and any(RunFolder(run).exists for run in (path, *path.glob("fold_*"))):
        return RunFolder(path).predictions
    raise ConfigError("only a run or a cross-validation has a folder for label maps; name a folder with --output")


def _require_writable(cases: Sequence[Case], files: PredictionFiles) -> None:
    """Raise unless a label map of the longest name can be written, before hours of work."""
    output, case = files.folder, max(cases, key=lambda case: len(os.fsencode(case["case"])))
    try:
        output.mkdir(parents=True, exist_ok=True)
        trial = name_partial(files.name_label_map(case))
        trial.touch()
        trial.unlink()
    except OSError as fault:
        raise ConfigError(
            f"label maps, such as {case['case'][:40]}, cannot be written to {output} ({fault.strerror or fault}); "
            "name another folder with --output, or give the case a shorter name"
        ) from fault


def _refuse_own_images(cases: Sequence[Case], files: PredictionFiles) -> None:
    # Resolved, because a relative path, an absolute one and a link may mean one file.
    written = {file.resolve() for case in cases for file in files.name_all(case)}
    images = [image for case in cases for image in list_files(case["image"])]
    if overwritten := [image for image in images if image.resolve() in written]:
        raise DataError(
            f"{files.folder} contains the image {overwritten[0]}, which a label map would replace; "
            "choose another --output"
        )


# Resolve the images that the paths of a command line name.


def resolve_images(
    paths: str | Path | Sequence[str | Path], modalities: Sequence[str] = ("image",), *, series: Sequence[str] = ()
) -> list[Case]:
    """Return a case per image: a file, every image in a folder, every DICOM series below one, every row of a table.

    Parameters
    ----------
    paths : path, or sequence of them
        Files, folders of files, DICOM folders and folders above them, or tables; see `volseg.data.layouts.table`.
    modalities : sequence of str
        Names of the channels. With several, a file has all of them, or each channel is in its own file in one folder:
        ``CASE_0000``, ``CASE_0001`` ..., or ``CASE_NAME``.
    series : sequence of str
        UIDs of DICOM series, or texts in their description, to select. By default all series except scouts and those
        without an image.

    Raises
    ------
    DataError
        For a path that is absent or an empty folder, missing channels, a missing series, or two images with one name,
        whose predictions would overwrite each other.
    """
    cases: list[Case] = []
    loose: list[Path] = []
    dicom: list[Path] = []
    is_chosen = not series
    paths = [paths] if isinstance(paths, str | Path) else paths
    for path in map(Path, paths):
        if path.suffix.lower() in TABLES and path.is_file():
            cases.extend(read_images(path, modalities))
        elif path.is_file() and match_suffix(path) is None and is_dicom(path):
            dicom.append(path)
        elif path.is_dir() and not list_images(path):
            found = search_series(path)
            if not (found.images or found.others or found.damaged):
                raise DataError(f"{path} contains neither an image nor a DICOM series; name another folder")
            held = [one.folder for one in (*found.images, *found.others)]
            if held in ([], [path]) and not series:  # exactly one series, or no DICOM, which its reader will report
                loose.append(path)
            else:
                cases.extend(_list_series(found, series, path))
                is_chosen = True
        elif path.is_dir():
            loose.extend(list_images(path))
        elif path.is_file():
            loose.append(path)
        else:
            raise DataError(f"{path} does not exist; name image files, DICOM folders or a folder of image files")
    if not (is_chosen or dicom):
        raise DataError(
            f"{list_some(list(map(str, paths)))}: there is no DICOM series to choose from; leave out --series"
        )
    if dicom:  # several may be of one series
        cases.extend(_list_series(gather_series(dicom), series, dicom[0].parent))
    cases.extend(group_channels(loose, modalities))
    for case in cases:
        require_text([case["case"], *list_files(case["image"])], "an image to predict")
    if doubled := list_duplicates(case["case"] for case in cases):
        same = [name_files(case["image"]) for case in cases if case["case"] == doubled[0]]
        raise DataError(f"{' and '.join(same)} would both be written as {doubled[0]}.nii.gz; predict them separately")
    return cases


def _list_series(found: FoundSeries, wanted: Sequence[str], where: Path) -> list[Case]:
    """Return a case per series to predict, and log the others."""
    chosen = choose_series(found, wanted, where)
    if left := [series for series in found.others if series not in chosen]:
        logger.info("%s: %d series left out: %s", where, len(left), "; ".join(f"{one}: {one.left_out}" for one in left))
    with_series = {one.folder for one in (*found.images, *found.others)}
    # If a folder has only damaged files, its reader reports it; a folder with a series next to them is refused.
    unread = sorted({file.parent for file in found.damaged} - with_series)
    is_only = len(chosen) == 1 and chosen[0].folder == where
    named = {name_image(where): chosen[0]} if is_only else name_series(chosen)
    return [
        *({"case": name, "image": series.first} for name, series in named.items()),
        *({"case": name_image(folder), "image": folder} for folder in unread),
    ]
