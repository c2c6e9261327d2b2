"""Write a label map as a DICOM segmentation that refers to the slices it was made from.

One segment per label or region, one bit per voxel (``BINARY``): regions may overlap, and every viewer that shows
segmentations shows these; the newer ``LABELMAP`` few do. Patient and study are the source's own, copied by highdicom,
and what the source leaves empty stays empty. Whatever is not a series of single-frame DICOM slices is refused.

highdicom is optional (``pip install highdicom``) and imported when a segmentation is written.
"""

import colorsys
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Task
from volseg.data.dicom import list_slices
from volseg.data.dicom_elements import is_dicom
from volseg.data.itk import lps_to_ras
from volseg.data.readers import Files, list_files, name_files
from volseg.errors import ConfigError, DataError, GridError
from volseg.files import replacing
from volseg.transforms.grid import MISPLACED_VOXELS, Grid
from volseg.version import __version__

if TYPE_CHECKING:
    from pydicom import Dataset

__all__ = ["CODES", "CodedName", "code_name", "require_dicom_source", "write_dicom_segmentation"]


SERIES_NUMBER = 9001
"""Far from those that scanners count."""

LONGEST_NAME = 64
"""Of DICOM's LO."""

MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("StudyID", "StudyDate", "StudyTime", "AccessionNumber", "ReferringPhysicianName"),
)
"""What DICOM wants in every object, if only as an empty element (type 2)."""

GOLDEN = 0.618034
"""Hues so far apart around the circle never come close to each other."""


def require_dicom_source(image: Files, case: str) -> Path:
    """Return what names the series that a case's image is; to be asked before anything is computed.

    Raises
    ------
    ConfigError
        If highdicom is not installed.
    DataError
        If the image is neither a DICOM folder nor one of a series' files.
    """
    _import_highdicom()
    files = list_files(image)
    if len(files) == 1 and (files[0].is_dir() or (files[0].is_file() and is_dicom(files[0]))):
        return files[0]
    raise DataError(
        f"case {case}: a DICOM segmentation refers to the DICOM slices that it was made from, and {name_files(image)} "
        "is no series of them; name a DICOM folder, or leave out --format dicom-seg to have NIfTI"
    )


def write_dicom_segmentation(
    label_map: Tensor,
    reference: MetaTensor,
    path: str | os.PathLike[str],
    *,
    task: Task,
    series: Path | Sequence[Path],
    weights: str,
) -> Path:
    """Write ``label_map`` as one DICOM file; return its path.

    Two writings are two objects with UIDs of their own, as DICOM wants, and not the same bytes.

    Parameters
    ----------
    label_map : Tensor
        ``(1, D, H, W)``, values of the task.
    reference : MetaTensor
        The image, as read or preprocessed: its original grid is meant.
    path : path
        Ends in ``.dcm``; it is written whole or not at all.
    task : Task
        Whose structures become segments, in order; one that is not in the label map is described and has no voxel.
    series : Path or sequence of Path
        The folder of the only series, one of a series' files, or all of them, in any order.
    weights : str
        Digest of the weights, which stands as serial number of the device.

    Raises
    ------
    ConfigError
        If highdicom is not installed.
    DataError
        If the slices lack what a reference to them needs, or the label map has other values.
    GridError
        If the label map does not lie on the slices.
    """
    hd = _import_highdicom()
    path, grid = Path(path), Grid.original(reference)
    if path.suffix.lower() != ".dcm":
        raise DataError(f"{path} must end in .dcm")
    voxels = torch.as_tensor(label_map).as_subclass(Tensor).detach().cpu()
    if tuple(voxels.shape) != (1, *grid.shape):
        raise GridError(f"{path} needs a label map (1, D, H, W) = {(1, *grid.shape)}, got {tuple(voxels.shape)}")
    slices = _read_slices(series)
    places = _locate(slices, grid)
    # Slices first, then rows and columns: the volume's third, second and first axes.
    planes = voxels[0].permute(2, 1, 0)[places].numpy()
    try:
        made = hd.seg.Segmentation(
            source_images=slices,
            pixel_array=_part(planes, task),
            segmentation_type="BINARY",
            segment_descriptions=_describe_segments(hd, task),
            series_instance_uid=hd.UID(),
            series_number=SERIES_NUMBER,
            sop_instance_uid=hd.UID(),
            instance_number=1,
            manufacturer="volseg",
            manufacturer_model_name="volseg",
            software_versions=__version__,
            device_serial_number=weights[:LONGEST_NAME],
            content_description=f"Predicted labels of {task.name}"[:LONGEST_NAME],
            omit_empty_frames=bool(planes.any()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as fault:  # as highdicom tells what a source lacks
        where = Path(str(slices[0].filename)).parent
        raise DataError(
            f"{where}: no DICOM segmentation can refer to these slices ({type(fault).__name__}: {fault}); write NIfTI "
            "instead, or correct the series"
        ) from fault
    with replacing(path) as partial:
        made.save_as(partial)
    return path


def _import_highdicom() -> Any:
    try:
        import highdicom  # an extra, and half a second
        import highdicom.seg
    except ImportError as fault:
        raise ConfigError(
            f"a DICOM segmentation needs highdicom ({fault}); install it by: pip install highdicom"
        ) from fault
    return highdicom


def _read_slices(series: Path | Sequence[Path]) -> list["Dataset"]:
    """Return the slices without their voxels."""
    import pydicom  # of the extra; highdicom has been imported by now

    files = list_slices(series) if isinstance(series, Path) else list(series)
    slices = [pydicom.dcmread(file, stop_before_pixels=True) for file in files]
    needed = (
        "FrameOfReferenceUID",
        "ImagePositionPatient",
        "ImageOrientationPatient",
        "PixelSpacing",
        "SOPInstanceUID",
    )
    for one, file in zip(slices, files, strict=True):
        if getattr(one, "NumberOfFrames", None) is not None:
            raise DataError(f"{file} holds several slices; DICOM segmentations are written for a slice per file so far")
        if missing := [name for name in needed if not one.get(name)]:
            raise DataError(
                f"{file} has no {', '.join(missing)}, and a DICOM segmentation cannot refer to it; write NIfTI instead"
            )
        for name in MAY_BE_EMPTY:
            if name not in one:
                setattr(one, name, None)
    return slices


def _locate(slices: Sequence["Dataset"], grid: Grid) -> list[int]:
    """Return the place of each slice along the volume's third axis; its corners must lie on the volume's, in mm."""
    allowed = MISPLACED_VOXELS * float(grid.affine[:3, :3].norm(dim=0).min())
    columns, rows, count = grid.shape
    places = []
    for one in slices:
        if (one.Columns, one.Rows, len(slices)) != grid.shape:
            raise GridError(
                f"{one.filename} is one of {len(slices)} slices of {one.Columns} x {one.Rows} voxels, and the label "
                f"map has {count} of {columns} x {rows}; name the series that was segmented"
            )
        right, down = np.array(one.ImageOrientationPatient, dtype=float).reshape(2, 3)
        by_row, by_column = (float(step) for step in one.PixelSpacing)
        first = np.array(one.ImagePositionPatient, dtype=float)
        last = first + right * by_column * (columns - 1) + down * by_row * (rows - 1)
        corners = torch.from_numpy(lps_to_ras(np.array([*zip(first, last, strict=True), (1, 1)])))
        place = round(torch.linalg.solve(grid.affine, corners[:, :1])[2].item())
        expected = grid.affine @ torch.tensor([[0, columns - 1], [0, rows - 1], [place, place], [1, 1]]).double()
        apart = float((expected - corners).norm(dim=0).max())
        if not (apart <= allowed and 0 <= place < count):
            raise GridError(
                f"{one.filename} lies {apart:.3g} mm away from the label map's nearest plane (at most {allowed:.3g} "
                "mm); name the series that was segmented"
            )
        places.append(place)
    if len(set(places)) < count:
        raise GridError(f"{slices[0].filename}: of the {count} slices two lie at one place; take the doubled ones out")
    return places


def _part(planes: np.ndarray, task: Task) -> np.ndarray:
    """Return which voxels are in which segment: their numbers, or where regions overlap a bit for each."""
    known = np.array(task.class_values)
    if strange := sorted(set(np.unique(planes).tolist()) - set(task.class_values)):
        raise DataError(f"the label map holds {strange[:5]}, and the values of {task.name} are {known.tolist()}")
    if not task.regions:
        return np.searchsorted(known, planes).astype(np.uint8)  # the background is 0, and 254 labels are the most
    return np.stack([np.isin(planes, values) for values in task.regions.values()], axis=-1).astype(np.uint8)


def _describe_segments(hd: Any, task: Task) -> list[Any]:
    """Return a description of each structure: its name, a code for it, a colour, and that no human drew it."""
    from pydicom.sr.codedict import codes  # of the extra; highdicom has been imported by now

    algorithm = hd.AlgorithmIdentificationSequence(
        name="volseg", version=__version__, family=codes.DCM.ArtificialIntelligence
    )
    described = []
    for number, name in enumerate(task.structures.values(), start=1):
        coded = code_name(name)
        red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN % 1, 0.7, 0.95)
        segment = hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:LONGEST_NAME],
            segmented_property_category=getattr(codes.SCT, coded.category),
            segmented_property_type=getattr(codes.SCT, coded.kind),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
            display_color=hd.color.CIELabColor.from_rgb(*(round(255 * part) for part in (red, green, blue))),
        )
        if coded.side is not None:
            side = hd.sr.CodedConcept.from_code(getattr(codes.SCT, coded.side))
            segment.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [side]
        described.append(segment)
    return described


# SNOMED CT codes for what labels are called, as DICOM wants them beside a segment's name.
#
# A name that is not here is no worse a label: its segment keeps the name, and is coded as tissue. On the right stand
# pydicom's keywords for codes of its own SNOMED CT dictionary, so that no number is copied by hand.


class CodedName(NamedTuple):
    """Keywords of SNOMED CT codes in ``pydicom.sr.codedict.codes.SCT``."""

    category: str
    kind: str
    side: str | None
    """``Left`` or ``Right``, where the name says so."""


ANATOMY, ABNORMAL, GENERIC = "AnatomicalStructure", "MorphologicallyAbnormalStructure", "Tissue"

CODES: dict[str, tuple[str, str]] = {
    **{
        name: (ANATOMY, keyword)
        for name, keyword in {
            "adrenal gland": "AdrenalGland",
            "aorta": "Aorta",
            "bladder": "Bladder",
            "brain": "Brain",
            "colon": "Colon",
            "duodenum": "Duodenum",
            "esophagus": "Esophagus",
            "gallbladder": "Gallbladder",
            "heart": "Heart",
            "hippocampus": "Hippocampus",
            "inferior vena cava": "InferiorVenaCava",
            "kidney": "Kidney",
            "left atrium": "LeftAtrium",
            "left ventricle": "LeftVentricle",
            "liver": "Liver",
            "lung": "Lung",
            "pancreas": "Pancreas",
            "prostate": "Prostate",
            "right atrium": "RightAtrium",
            "right ventricle": "RightVentricle",
            "spinal cord": "SpinalCord",
            "spleen": "Spleen",
            "stomach": "Stomach",
            "trachea": "Trachea",
            "urinary bladder": "Bladder",
            "vessel": "BloodVessel",
        }.items()
    },
    **{
        name: (ABNORMAL, keyword)
        for name, keyword in {
            "cancer": "Neoplasm",
            "edema": "Edema",
            "lesion": "Lesion",
            "necrosis": "Necrosis",
            "oedema": "Edema",
            "tumor": "Neoplasm",
            "tumour": "Neoplasm",
        }.items()
    },
}
"""Category and code of a name in lower case, words apart, without left and right."""


def code_name(name: str) -> CodedName:
    """Return the codes for a label's name, generic ones where it is not known.

    Examples
    --------
    >>> code_name("Kidney_left")
    CodedName(category='AnatomicalStructure', kind='Kidney', side='Left')
    >>> code_name("left atrium").side, code_name("zone 3").kind
    (None, 'Tissue')
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    sides = [word for word in words if word in ("left", "right")]
    without = [word for word in words if word not in sides]
    side = sides[0].capitalize() if len(sides) == 1 else None
    if (coded := CODES.get(" ".join(words))) is not None:
        return CodedName(*coded, side=None)  # the side is part of the structure's own name
    category, kind = CODES.get(" ".join(without), (GENERIC, GENERIC))
    return CodedName(category, kind, side)
