"""Label maps for new images, from a run folder."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from volseg.data.cases import Case
from volseg.data.checks import check_cases, require_sound
from volseg.data.names import find_doubled
from volseg.data.preparing import prepare
from volseg.data.readers import SUFFIXES, stem
from volseg.errors import DataError
from volseg.experiment.building import build_predictor, preprocessing_of
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.trained import load_trained
from volseg.monitoring.progress import count_up, progress
from volseg.workflow.validation import Testing

__all__ = ["find_images", "predict"]


def predict(
    folder: RunFolder, images: Sequence[Path], output: Path | None = None, *, checkpoint: str = "latest"
) -> dict[str, Path]:
    """Predict images and write each label map as ``CASE.nii.gz`` on its image's own grid.

    Parameters
    ----------
    folder : RunFolder
        Of the training.
    images : sequence of Path
        Files, DICOM folders, or folders of files; see `find_images`.
    output : Path, optional
        Folder for the label maps; ``predictions`` in the run folder by default.
    checkpoint : str
        ``latest`` (the end of the training, as nnU-Net does) or ``best``.

    Returns
    -------
    dict
        Case id to the file written.

    Raises
    ------
    DataError
        For images that cannot be used, all of them at once, before the first is predicted.
    """
    output = folder.predictions if output is None else output
    cases = find_images(images)
    _refuse_overwriting(cases, output)
    trained = load_trained(folder, checkpoint)
    # Hence each file is read twice: what waits for its turn need not fit into memory, as a training's cases do.
    with count_up(len(cases), "checking") as count:
        require_sound(check_cases(cases, trained.task, progress=count), "mend them, or leave them out")
    config = trained.config
    testing = Testing(
        build_predictor(config, trained.task, trained.model, mirror=config.inference.mirror),
        _prepare_each(cases, preprocessing_of(config)),
        output,
        batch_size=config.inference.batch,
        show=partial(progress, title="predicting", total=len(cases)),
    )
    return testing()


def _prepare_each(cases: Sequence[Case], preprocessing: partial[Case]) -> Iterator[Case]:
    return (prepare(case, preprocessing) for case in cases)


def _refuse_overwriting(cases: Sequence[Case], output: Path) -> None:
    # Resolved, because a relative path, an absolute one and a link may mean one file.
    written = {(output / f"{case['case']}.nii.gz").resolve() for case in cases}
    if overwritten := [case["image"] for case in cases if case["image"].resolve() in written]:
        raise DataError(f"{output} holds the image {overwritten[0]} itself; choose another folder for the predictions")


def find_images(paths: Sequence[Path]) -> list[Case]:
    """Return a case per image: a file, a DICOM folder, or every image file in a folder.

    Raises
    ------
    DataError
        For a path that is absent, or two images of one name, whose predictions would overwrite each other.
    """
    images = [image for path in paths for image in _list_images(path)]
    # The folder "." has a name too.
    cases: list[Case] = [{"case": stem(os.path.abspath(image)), "image": image} for image in images]
    if doubled := find_doubled(case["case"] for case in cases):
        same = [str(case["image"]) for case in cases if case["case"] == doubled[0]]
        raise DataError(f"{' and '.join(same)} would both be written as {doubled[0]}.nii.gz; predict them apart")
    return cases


def _list_images(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name image files, DICOM folders or a folder of image files")
    if path.is_file():
        return [path]
    # macOS leaves "._name" beside each file of an archive.
    inside = sorted(
        p for p in path.iterdir() if p.name.lower().endswith(tuple(SUFFIXES)) and not p.name.startswith(".")
    )
    return inside or [path]
