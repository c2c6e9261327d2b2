"""Read data sets in their usual layouts: lists of MSD and nnU-Net, folders of pairs (nnU-Net's too), tables of paths.

Each module reads one layout into the same `volseg.data.cases.Task`; `load_task` detects the layout. No other code
depends on the layout.
"""

import os
from collections.abc import Callable
from pathlib import Path

from volseg.config.nearest import suggest_path
from volseg.data.cases import Task
from volseg.data.layouts.declared import MANIFESTS, read_manifest
from volseg.data.layouts.files import load_listed
from volseg.data.layouts.pairs import IMAGE_FOLDERS, LABEL_FOLDERS, TEST_FOLDERS, detect_arrangement, load_pairs
from volseg.data.layouts.table import TABLES, list_tables, load_table
from volseg.errors import DataError
from volseg.files import require_text

__all__ = ["find_task", "load_task"]

OWN_FOLDERS = frozenset(name.casefold() for name in (*IMAGE_FOLDERS, *LABEL_FOLDERS, *TEST_FOLDERS))
"""Folders inside a data set; the path of one also names the data set."""


def load_task(root: str | Path, *, require_files: bool = True) -> Task:
    """Read the description of a data set's cases, in any layout.

    No image is opened. Label maps are read once if the labels are not declared.

    Parameters
    ----------
    root
        The folder of a data set, or one level above or below it; or a table (CSV or TSV).
    require_files
        Refuse a declared training file that is absent. ``False`` leaves this to the data check, which names the case.

    Raises
    ------
    DataError
        If there is no data set, or its description is invalid; the message gives the remedy.
    """
    place = find_task(root)
    if place.is_file():
        return load_table(place, require_files=require_files)
    manifest = read_manifest(place)
    if manifest is not None and {"training", "dataset"} & manifest[1].keys():
        return load_listed(*manifest, require_files=require_files)
    if tables := list_tables(place):
        if len(tables) > 1:
            raise DataError(f"{place} contains the tables {', '.join(path.name for path in tables)}; name one")
        return load_table(tables[0], require_files=require_files)
    if (arrangement := detect_arrangement(place)) is not None:
        return load_pairs(place, arrangement, manifest, require_files=require_files)
    raise DataError(
        f"{place} has a manifest without cases under 'training', and no images with label maps; needed: imagesTr and "
        "labelsTr, or pairs such as CASE.nii.gz and CASE_seg.nii.gz"
    )


def find_task(root: str | Path) -> Path:
    """Return the folder of the data set: ``root``, the only one below it, or the one above its image folder.

    A folder of the same name inside the task's folder, as some archives have it, counts as the same level. A table is
    returned unchanged.

    Raises
    ------
    DataError
        If there is no data set, or more than one.
    """
    root = Path(os.path.abspath(root))  # the folder's own name counts, so links are not resolved
    require_text(root, "a data set")
    if not root.exists():
        raise DataError(
            f"{root} does not exist; name the folder of a data set, such as TaskNN_Name of the Decathlon"
            f"{suggest_path(root)}"
        )
    if root.name in MANIFESTS:
        root = root.parent
    if root.is_file() and root.suffix.lower() in TABLES:
        return root
    if not root.is_dir():
        raise DataError(f"{root} is not a data set; name a folder, or a table ({', '.join(TABLES)})")
    # A listed data set comes first: its files may have any names.
    if found := _search_near(root, lambda at: any((*map(Path.is_file, map(at.joinpath, MANIFESTS)), *list_tables(at)))):
        return found
    if found := _search_near(root, lambda folder: folder.is_dir() and detect_arrangement(folder) is not None):
        return found
    raise DataError(
        f"{root} is not a data set: neither it nor a folder in it has a dataset.json, or images with label maps; "
        f"needed: dataset.json next to imagesTr and labelsTr, folders called {IMAGE_FOLDERS[0]} and "
        f"{LABEL_FOLDERS[0]}, pairs such as CASE.nii.gz and CASE_seg.nii.gz, or a table ({', '.join(TABLES)})"
    )


def _search_near(root: Path, is_data_set: Callable[[Path], bool]) -> Path | None:
    if is_data_set(root):
        return root
    if root.name.casefold() in OWN_FOLDERS and is_data_set(root.parent):
        return root.parent
    children = [child for child in sorted(root.glob("*/")) if not child.name.startswith((".", "_"))]
    below = [folder for child in children for folder in (child, child / child.name) if is_data_set(folder)]
    if len(below) > 1:
        raise DataError(f"{root} contains {len(below)} data sets: {', '.join(path.name for path in below)}; name one")
    return below[0] if below else None
