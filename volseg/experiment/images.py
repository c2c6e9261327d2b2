"""Which images are meant by the paths of a command line, and which of them cannot be used."""

import logging
from collections.abc import Sequence
from pathlib import Path

from volseg.data.cases import Case
from volseg.data.dicom_elements import is_dicom
from volseg.data.dicom_series import FoundSeries, choose_series, gather_series, name_series, search_series
from volseg.data.layouts.channels import group_channels, name_image
from volseg.data.layouts.files import list_images
from volseg.data.layouts.table import TABLES, read_images
from volseg.data.names import find_doubled, list_some
from volseg.data.readers import find_suffix, list_files, name_files, require_header
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, ReaderError
from volseg.files import require_text

__all__ = ["list_unusable", "resolve_images"]

logger = logging.getLogger(__name__)


def resolve_images(
    paths: str | Path | Sequence[str | Path], modalities: Sequence[str] = ("image",), *, series: Sequence[str] = ()
) -> list[Case]:
    """Return a case per image: a file, every image in a folder, every DICOM series below one, every row of a table.

    Parameters
    ----------
    paths : path, or sequence of them
        Files, folders of files, DICOM folders and folders above them, or tables; see `volseg.data.layouts.table`.
    modalities : sequence of str
        Names of the channels. Of several, a file holds all, or the channels of a case lie in files beside each other:
        ``CASE_0000``, ``CASE_0001`` ..., or ``CASE_NAME``.
    series : sequence of str
        Of DICOM only the series with one of these UIDs, or one of these texts in their description. By default all but
        scouts and what is no image.

    Raises
    ------
    DataError
        For a path that is absent or a folder with nothing in it, channels that are not all there, a series that is not
        there, or two images of one name, whose predictions would overwrite each other.
    """
    cases: list[Case] = []
    loose: list[Path] = []
    dicom: list[Path] = []
    is_chosen = not series
    paths = [paths] if isinstance(paths, str | Path) else paths
    for path in map(Path, paths):
        if path.suffix.lower() in TABLES and path.is_file():
            cases.extend(read_images(path, modalities))
        elif path.is_file() and find_suffix(path) is None and is_dicom(path):
            dicom.append(path)
        elif path.is_dir() and not list_images(path):
            found = search_series(path)
            if not (found.images or found.others or found.damaged):
                raise DataError(_nothing_in(path))
            if _is_alone(found, path) and not series:
                loose.append(path)
            else:
                cases.extend(_list_series(found, series, path))
                is_chosen = True
        else:
            loose.extend(_list_images(path))
    if not (is_chosen or dicom):
        raise DataError(
            f"{list_some(list(map(str, paths)))}: no DICOM among them to choose series of; leave out --series"
        )
    if dicom:  # of which several may be of one series
        cases.extend(_list_series(gather_series(dicom), series, dicom[0].parent))
    cases.extend(group_channels(loose, modalities))
    for case in cases:
        require_text([case["case"], *list_files(case["image"])], "an image to predict")
    if doubled := find_doubled(case["case"] for case in cases):
        same = [name_files(case["image"]) for case in cases if case["case"] == doubled[0]]
        raise DataError(f"{' and '.join(same)} would both be written as {doubled[0]}.nii.gz; predict them apart")
    return cases


def list_unusable(cases: Sequence[Case]) -> dict[str, ReaderError]:
    """Return the cases whose files are absent or do not begin as images do, with the reason; no voxel is read."""
    faults = zip(cases, map_in_threads(_look_at, cases), strict=True)
    return {case["case"]: fault for case, fault in faults if fault is not None}


def _look_at(case: Case) -> ReaderError | None:
    try:
        for file in list_files(case["image"]):
            require_header(file)
    except ReaderError as fault:
        return fault
    return None


def _nothing_in(folder: Path) -> str:
    held = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    holds = f"it holds {list_some(held, 4)}" if held else "it is empty"
    return (
        f"{folder} has neither an image nor a DICOM series in it: {holds}; name image files or the folder they lie in"
    )


def _list_images(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist; name image files, DICOM folders or a folder of image files")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder; name image files, DICOM folders or a folder of files")
    return list_images(path)


def _is_alone(found: FoundSeries, folder: Path) -> bool:
    """Return whether a folder is one series and nothing else, or no DICOM, of which the reader says what it is."""
    return {series.folder for series in (*found.images, *found.others)} <= {folder} and (
        len(found.images) + len(found.others) <= 1
    )


def _list_series(found: FoundSeries, wanted: Sequence[str], where: Path) -> list[Case]:
    """Return a case per series that is to be predicted, and say which are not."""
    chosen = choose_series(found, wanted, where)
    if left := [series for series in found.others if series not in chosen]:
        logger.info("%s: %d series left out: %s", where, len(left), "; ".join(f"{one}: {one.left_out}" for one in left))
    with_series = {one.folder for one in (*found.images, *found.others)}
    # Of a folder of damaged files alone the reader says so; beside a series it refuses that.
    unread = sorted({file.parent for file in found.damaged} - with_series)
    is_only = len(chosen) == 1 and chosen[0].folder == where
    named = {name_image(where): chosen[0]} if is_only else name_series(chosen)
    return [
        *({"case": name, "image": series.first} for name, series in named.items()),
        *({"case": name_image(folder), "image": folder} for folder in unread),
    ]
