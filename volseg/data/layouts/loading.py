"""From a folder, or a table, to the task that it holds, in whichever layout its cases lie."""

import os
from pathlib import Path

from volseg.data.cases import Task
from volseg.data.layouts.declared import MANIFESTS, read_manifest
from volseg.data.layouts.msd import load_msd
from volseg.data.layouts.nnunet import load_nnunet
from volseg.errors import DataError

__all__ = ["find_task", "load_task"]

IMAGE_FOLDERS = ("imagesTr", "labelsTr", "imagesTs")


def load_task(root: str | Path, *, require_files: bool = True) -> Task:
    """Read what a data set declares; no image is opened.

    Parameters
    ----------
    root
        The folder of a data set, or one level above or below it.
    require_files
        Refuse a declared training file that is absent. ``False`` leaves that to the data check, which names the case.

    Raises
    ------
    DataError
        There is no data set, or what it says of itself cannot be trusted; the message says what to mend.
    """
    folder = find_task(root)
    manifest = read_manifest(folder)
    assert manifest is not None, "a folder that find_task returned"
    path, declared = manifest
    if "training" not in declared and ("file_ending" in declared or "channel_names" in declared):
        return load_nnunet(path, declared, require_files=require_files)
    return load_msd(path, declared, require_files=require_files)


def find_task(root: str | Path) -> Path:
    """Return the folder of the data set: ``root``, the only one below it, or the one above its image folder.

    A folder of the same name inside the task's folder, as archives leave it, counts as the same level.
    """
    root = Path(os.path.abspath(root))  # the folder's own name counts, so links are not resolved
    if not root.exists():
        raise DataError(f"{root} does not exist; name the TaskNN_Name folder of an MSD task, or another data set's")
    if root.name in MANIFESTS:
        root = root.parent
    if _is_described(root):
        return root
    if root.name in IMAGE_FOLDERS and _is_described(root.parent):
        return root.parent
    children = [child for child in sorted(root.glob("*/")) if not child.name.startswith((".", "_"))]
    below = [folder for child in children for folder in (child, child / child.name) if _is_described(folder)]
    if len(below) > 1:
        raise DataError(f"{root} holds {len(below)} tasks: {', '.join(path.name for path in below)}; name one of them")
    if not below:
        raise DataError(
            f"{root} is no MSD task: there is no dataset.json in it, in a folder of it, or above it; "
            "needed: dataset.json beside imagesTr and labelsTr"
        )
    return below[0]


def _is_described(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MANIFESTS)
