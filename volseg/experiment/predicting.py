"""Label maps for new images, from a run folder."""

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from volseg.data.cases import Case
from volseg.data.checks import inspect_cases, require_sound, summarise_remarks
from volseg.data.layouts.channels import group_channels
from volseg.data.layouts.files import list_images
from volseg.data.layouts.table import TABLES, read_images
from volseg.data.names import find_doubled
from volseg.data.preprocessed import Preprocessing, prepare
from volseg.data.readers import list_files, name_files
from volseg.errors import ConfigError, DataError
from volseg.experiment.building import build_predictor
from volseg.experiment.out_of_memory import explaining_memory
from volseg.experiment.prediction_record import PredictionRecord
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.sources import load_trained
from volseg.experiment.trained import CHECKPOINTS
from volseg.files import replacing
from volseg.inference.prediction import Prediction
from volseg.monitoring.progress import count_up
from volseg.workflow.validation import Testing

__all__ = ["find_images", "predict"]

logger = logging.getLogger(__name__)


def predict(
    folder: RunFolder,
    images: Sequence[Path],
    output: Path | None = None,
    *,
    checkpoint: str = "latest",
    resume: bool = False,
) -> dict[str, Path]:
    """Predict images and write each label map as ``CASE.nii.gz`` on its image's own grid.

    Parameters
    ----------
    folder : RunFolder
        Of the training.
    images : sequence of Path
        Files, DICOM folders, folders of files, or tables; see `find_images`.
    output : Path, optional
        Folder for the label maps; ``predictions`` in the run folder by default.
    checkpoint : str
        ``latest`` (the end of the training, as nnU-Net does) or ``best``.
    resume : bool
        Go on with a prediction that was interrupted: label maps that it left whole are not made again.

    Returns
    -------
    dict
        Case id to the file of its label map, written now or before.

    Raises
    ------
    DataError
        For images that cannot be used, all of them at once, before the first is predicted.
    ConfigError
        If the label maps cannot be written, or those to go on with were made otherwise.
    OutOfMemoryError
        If a volume does not fit its device.
    """
    output = folder.predictions if output is None else output
    trained = load_trained(folder, checkpoint)
    cases = find_images(images, trained.task.modalities)
    _refuse_overwriting(cases, output)
    _require_writable(cases, output)
    config = trained.config
    record = PredictionRecord(output, trained, CHECKPOINTS[checkpoint])
    done = record.find_done(cases) if resume else {}
    waiting = [case for case in cases if case["case"] not in done]
    # Hence each file is read twice: what waits for its turn need not fit into memory, as a training's cases do.
    with count_up(len(waiting), "checking") as count:
        found = inspect_cases(waiting, trained.task, progress=count)
    for line in summarise_remarks(found.remarks):
        logger.warning("look at %s", line)
    require_sound(found.problems, "mend them, or leave them out")
    if not resume:
        record.begin()
    with explaining_memory(config), count_up(len(cases), "predicting", done=len(done)) as count:

        def recorded(predicted: Iterable[tuple[Case, Prediction]]) -> Iterator[tuple[Case, Prediction]]:
            for case, prediction in predicted:
                yield case, prediction  # whoever asks for the next one has written this one
                record.add({"case": case["case"], "image": paths[case["case"]]})
                count()

        paths = {case["case"]: case["image"] for case in waiting}
        testing = Testing(
            build_predictor(config, trained.task, trained.models, mirror=config.inference.mirror),
            _prepare_each(waiting, trained.preprocessing),
            output,
            batch_size=config.inference.batch,
            show=recorded,
        )
        try:
            written = testing()
        except OSError as fault:
            raise ConfigError(
                f"label maps cannot be written to {output} ({fault.strerror or fault}); free space, then go on by "
                "--resume, or name another folder by --output"
            ) from fault
    return {case["case"]: done.get(case["case"]) or written[case["case"]] for case in cases}


class _Tried(Exception):  # noqa: N818  (no error: it leaves a block that would keep what was written)
    pass


def _require_writable(cases: Sequence[Case], output: Path) -> None:
    """Raise unless a label map of the longest name can be written, before hours of work."""
    longest = max(cases, key=lambda case: len(os.fsencode(case["case"])))["case"]
    try:
        with suppress(_Tried), replacing(output / f"{longest}.nii.gz") as partial:
            partial.touch()
            raise _Tried
    except OSError as fault:
        remedy = (
            f"rename {longest[:40]}..., of {len(longest)} characters, to a shorter name"
            if fault.errno == errno.ENAMETOOLONG
            else "name another folder by --output"
        )
        raise ConfigError(f"label maps cannot be written to {output} ({fault.strerror or fault}); {remedy}") from fault


def _prepare_each(cases: Sequence[Case], preprocessing: Preprocessing) -> Iterator[Case]:
    return (prepare(case, preprocessing) for case in cases)


def _refuse_overwriting(cases: Sequence[Case], output: Path) -> None:
    # Resolved, because a relative path, an absolute one and a link may mean one file.
    written = {(output / f"{case['case']}.nii.gz").resolve() for case in cases}
    images = [image for case in cases for image in list_files(case["image"])]
    if overwritten := [image for image in images if image.resolve() in written]:
        raise DataError(f"{output} holds the image {overwritten[0]} itself; choose another folder for the predictions")


def find_images(paths: Sequence[Path], modalities: Sequence[str] = ("image",)) -> list[Case]:
    """Return a case per image: a file, a DICOM folder, every image in a folder, or every row of a table.

    Parameters
    ----------
    paths : sequence of Path
        Files, DICOM folders, folders of files, or tables; see `volseg.data.layouts.table`.
    modalities : sequence of str
        Names of the channels. Of several, a file holds all, or the channels of a case lie in files beside each other:
        ``CASE_0000``, ``CASE_0001`` ..., or ``CASE_NAME``.

    Raises
    ------
    DataError
        For a path that is absent, channels that are not all there, or two images of one name, whose predictions would
        overwrite each other.
    """
    cases: list[Case] = []
    loose: list[Path] = []
    for path in paths:
        if path.suffix.lower() in TABLES and path.is_file():
            cases.extend(read_images(path, modalities))
        else:
            loose.extend(_list_images(path))
    cases.extend(group_channels(loose, modalities))
    if doubled := find_doubled(case["case"] for case in cases):
        same = [name_files(case["image"]) for case in cases if case["case"] == doubled[0]]
        raise DataError(f"{' and '.join(same)} would both be written as {doubled[0]}.nii.gz; predict them apart")
    return cases


def _list_images(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name image files, DICOM folders or a folder of image files")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder; name image files, DICOM folders or a folder of files")
    return list_images(path) or [path]
