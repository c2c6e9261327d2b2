"""Write a label map as a DICOM segmentation or structure set that refers to its source slices.

A segmentation has one segment per label or region, one bit per voxel (``BINARY``). Its regions may overlap, and every
viewer of segmentations supports it; few support the newer ``LABELMAP``. A structure set has closed contours along the
sides of voxels. Patient and study are copied from the source, and its empty elements stay empty. Only a series of
single-frame DICOM slices is accepted as source.

highdicom is optional (``pip install highdicom``) and imported when a segmentation is written.
"""

import colorsys
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Task
from volseg.data.dicom.elements import is_dicom
from volseg.data.dicom.frames import list_frames
from volseg.data.dicom.labels import import_highdicom, trace_contours
from volseg.data.dicom.series import list_slices, require_header
from volseg.data.dicom.volumes import stack_frames
from volseg.data.itk import lps_to_ras
from volseg.data.readers import Files, list_files, name_files
from volseg.errors import DataError, GridError
from volseg.files import replacing
from volseg.transforms.grid import Grid
from volseg.version import __version__

if TYPE_CHECKING:
    from pydicom import Dataset

SERIES_NUMBER = 9001
"""Series number of segmentations, far from those of scanners."""

STRUCTURE_SET, STUDY = "1.2.840.10008.5.1.4.1.1.481.3", "1.2.840.10008.3.1.2.3.1"
LONGEST_NAME = 64
"""Longest value of DICOM's LO."""

MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex"),
    *("StudyID", "StudyDate", "StudyTime", "AccessionNumber", "ReferringPhysicianName"),
)
"""Elements that DICOM requires in every object, if only empty (type 2)."""

GOLDEN = 0.618034
"""Step around the circle of hues that keeps all hues apart."""


def require_dicom_source(image: Files, case: str) -> Path:
    """Return the path of a case's DICOM series; call it before any computation.

    Raises
    ------
    ConfigError
        If highdicom is not installed.
    DataError
        If the image is neither a DICOM folder nor a file of a series.
    """
    import_highdicom()
    files = list_files(image)
    if len(files) == 1 and (files[0].is_dir() or (files[0].is_file() and is_dicom(files[0]))):
        return files[0]
    raise DataError(
        f"case {case}: a DICOM segmentation refers to the DICOM slices of its image, but {name_files(image)} is not "
        "a DICOM series; name a DICOM folder, or leave out --format to write NIfTI"
    )


def write_dicom_segmentation(
    label_map: Tensor,
    reference: MetaTensor,
    path: str | os.PathLike[str],
    *,
    task: Task,
    series: Path | Sequence[Path],
    weights: str,
    kind: Literal["SEG", "RTSTRUCT"] = "SEG",
) -> Path:
    """Write ``label_map`` as one DICOM file, a segmentation or a structure set; return its path.

    Each call writes a new object with new UIDs, as DICOM requires, so the bytes differ.

    Parameters
    ----------
    label_map : Tensor
        ``(1, D, H, W)``, values of the task.
    reference : MetaTensor
        The image, as read or preprocessed; the label map is on its original grid.
    path : path
        Path that ends in ``.dcm``; the file is written atomically.
    task : Task
        Its structures become segments, in order; a structure that is absent from the label map gets an empty segment.
    series : Path or sequence of Path
        The folder of one series, one of the series' files, or all of them, in any order.
    weights : str
        Digest of the weights, written as the device's serial number.
    kind : str
        Modality of the file.

    Raises
    ------
    ConfigError
        If highdicom is not installed.
    DataError
        If the slices lack elements that a reference needs, or the label map has other values.
    GridError
        If the label map is not on the grid of the slices.
    """
    hd = import_highdicom()
    path = Path(path)
    slices, planes = _match_slices(label_map, reference, path, series)
    parts = _part(planes, task)
    try:
        if kind == "SEG":
            made = _build_segmentation(hd, slices, parts, task, weights)
        else:
            to_mm = lps_to_ras(Grid.original(reference).affine.numpy())
            masks = [np.isin(planes, values) for values in task.structures]
            contours = [_draw(number, mask, slices, to_mm) for number, mask in enumerate(masks, start=1)]
            made = _build_structure_set(hd, slices, contours, task, weights)
    except (AttributeError, KeyError, TypeError, ValueError) as fault:  # highdicom's errors for invalid source slices
        where = Path(str(slices[0].filename)).parent
        raise DataError(
            f"{where}: no DICOM segmentation can refer to these slices ({type(fault).__name__}: {fault}); write NIfTI "
            "instead, or correct the series"
        ) from fault
    with replacing(path) as partial:
        made.save_as(partial)
    return path


def _build_segmentation(hd: Any, slices: Sequence["Dataset"], parts: np.ndarray, task: Task, weights: str) -> Any:
    """Return a SEG with a segment per label or region."""
    return hd.seg.Segmentation(
        source_images=slices,
        pixel_array=parts,
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
        omit_empty_frames=bool(parts.any()),
    )


def _build_structure_set(
    hd: Any, slices: Sequence["Dataset"], contours: Sequence["Dataset"], task: Task, weights: str
) -> Any:
    """Return an RTSTRUCT with a region of interest per label or region, and its ``contours``.

    A hole is a contour inside another: a point is in the region if an odd number of contours surrounds it.
    """
    first, now = slices[0], datetime.now()
    made = hd.SOPClass(
        study_instance_uid=first.StudyInstanceUID,
        series_instance_uid=hd.UID(),
        series_number=SERIES_NUMBER,
        sop_instance_uid=hd.UID(),
        instance_number=1,
        sop_class_uid=STRUCTURE_SET,
        modality="RTSTRUCT",
        manufacturer="volseg",
    )
    made.copy_patient_and_study_information(first)
    described = {"ROIGenerationAlgorithm": "AUTOMATIC", "ReferencedFrameOfReferenceUID": first.FrameOfReferenceUID}
    named = list(enumerate(task.structures.values(), start=1))
    content = {
        "SoftwareVersions": __version__,
        "DeviceSerialNumber": weights[:LONGEST_NAME],
        "StructureSetLabel": "volseg",
        "StructureSetDate": now.strftime("%Y%m%d"),
        "StructureSetTime": now.strftime("%H%M%S"),
        "ReferencedFrameOfReferenceSequence": [_refer(slices)],
        "StructureSetROISequence": [
            _item(ROINumber=number, ROIName=name[:LONGEST_NAME], **described) for number, name in named
        ],
        "ROIContourSequence": list(contours),
        "RTROIObservationsSequence": [
            _item(ObservationNumber=number, ReferencedROINumber=number, RTROIInterpretedType="", ROIInterpreter="")
            for number, _ in named
        ],
    }
    made.update(content)
    return made


def _item(**elements: Any) -> "Dataset":
    """Return an item of a sequence."""
    import pydicom  # optional; highdicom has been imported by now

    item = pydicom.Dataset()
    item.update(elements)  # type: ignore[arg-type]  # by keyword
    return item


def _name_image(one: "Dataset") -> "Dataset":
    return _item(ReferencedSOPClassUID=one.SOPClassUID, ReferencedSOPInstanceUID=one.SOPInstanceUID)


def _refer(slices: Sequence["Dataset"]) -> "Dataset":
    """Return the reference to the series, with each slice."""
    first, images = slices[0], [_name_image(one) for one in slices]
    series = _item(SeriesInstanceUID=first.SeriesInstanceUID, ContourImageSequence=images)
    study = {"ReferencedSOPClassUID": STUDY, "ReferencedSOPInstanceUID": first.StudyInstanceUID}
    return _item(
        FrameOfReferenceUID=first.FrameOfReferenceUID,
        RTReferencedStudySequence=[_item(**study, RTReferencedSeriesSequence=[series])],
    )


def _draw(number: int, masks: np.ndarray, slices: Sequence["Dataset"], to_mm: np.ndarray) -> "Dataset":
    """Return the contours of a region of interest, given its mask in each slice."""
    contours = []
    for place, (mask, one) in enumerate(zip(masks, slices, strict=True)):
        for points in trace_contours(mask):
            index = np.stack([points[:, 1], points[:, 0], np.full(len(points), place), np.ones(len(points))])
            contours.append(
                _item(
                    ContourImageSequence=[_name_image(one)],
                    ContourGeometricType="CLOSED_PLANAR",
                    NumberOfContourPoints=len(points),
                    ContourData=[f"{value:.5f}" for value in (to_mm @ index)[:3].T.ravel()],
                )
            )
    drawn = {"ContourSequence": contours} if contours else {}
    colour = [round(255 * part) for part in _choose_colour(number)]
    return _item(ROIDisplayColor=colour, ReferencedROINumber=number, **drawn)


def _match_slices(
    label_map: Tensor, reference: MetaTensor, path: Path, series: Path | Sequence[Path]
) -> tuple[list["Dataset"], np.ndarray]:
    """Return the slices in the order of the volume's third axis, and their labels ``(slices, rows, columns)``."""
    grid = Grid.original(reference)
    if path.suffix.lower() != ".dcm":
        raise DataError(f"{path} must end in .dcm")
    voxels = torch.as_tensor(label_map).as_subclass(Tensor).detach().cpu()
    if tuple(voxels.shape) != (1, *grid.shape):
        raise GridError(f"{path} needs a label map (1, D, H, W) = {(1, *grid.shape)}, got {tuple(voxels.shape)}")
    files = list_slices(series) if isinstance(series, Path) else list(series)
    frames, affine = stack_frames([frame for file in files for frame in list_frames(require_header(file))])
    if len(frames) > len(files):
        raise DataError(f"{files[0]} contains several slices; DICOM segmentations need one file per slice")
    stored = frames[0].stored
    of_series = Grid((stored.columns, stored.rows, len(frames)), torch.from_numpy(affine))
    grid.require_same(of_series, "label map", f"DICOM series of {files[0]}")
    return [_read_slice(frame.file) for frame in frames], voxels[0].permute(2, 1, 0).numpy()


def _choose_colour(number: int) -> tuple[float, float, float]:
    """Return red, green and blue, from 0 to 1."""
    return colorsys.hsv_to_rgb(number * GOLDEN % 1, 0.7, 0.95)


def _read_slice(file: Path) -> "Dataset":
    """Return a slice without its voxels."""
    import pydicom  # optional; highdicom has been imported by now

    one = pydicom.dcmread(file, stop_before_pixels=True)
    if missing := [name for name in ("FrameOfReferenceUID", "SOPInstanceUID") if not one.get(name)]:
        raise DataError(
            f"{file} has no {', '.join(missing)}, so a DICOM segmentation cannot refer to it; write NIfTI instead"
        )
    for name in MAY_BE_EMPTY:
        if name not in one:
            setattr(one, name, None)
    return one


def _part(planes: np.ndarray, task: Task) -> np.ndarray:
    """Return the segment number of each voxel, or one bit per segment if regions overlap."""
    known = np.array(task.class_values)
    if strange := sorted(set(np.unique(planes).tolist()) - set(task.class_values)):
        raise DataError(f"the label map has values {strange[:5]}, but those of {task.name} are {known.tolist()}")
    if not task.regions:
        return np.searchsorted(known, planes).astype(np.uint8)  # the background is 0; 254 labels at most
    return np.stack([np.isin(planes, values) for values in task.regions.values()], axis=-1).astype(np.uint8)


def _describe_segments(hd: Any, task: Task) -> list[Any]:
    """Return a description of each structure: its name, code and colour, and the automatic algorithm."""
    from pydicom.sr.codedict import codes  # optional; highdicom has been imported by now

    algorithm = hd.AlgorithmIdentificationSequence(
        name="volseg", version=__version__, family=codes.DCM.ArtificialIntelligence
    )
    described = []
    for number, name in enumerate(task.structures.values(), start=1):
        coded = code_name(name)
        segment = hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:LONGEST_NAME],
            segmented_property_category=getattr(codes.SCT, coded.category),
            segmented_property_type=getattr(codes.SCT, coded.kind),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
            display_color=hd.color.CIELabColor.from_rgb(*(round(255 * part) for part in _choose_colour(number))),
        )
        if coded.side is not None:
            side = hd.sr.CodedConcept.from_code(getattr(codes.SCT, coded.side))
            segment.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = [side]
        described.append(segment)
    return described


# SNOMED CT codes for names of labels, which DICOM requires in addition to a segment's name. A label with an unlisted
# name keeps its name and is coded as tissue. The codes are keywords of pydicom's SNOMED CT dictionary, so that no
# number is copied by hand.


class CodedName(NamedTuple):
    """Keywords of SNOMED CT codes in ``pydicom.sr.codedict.codes.SCT``."""

    category: str
    kind: str
    side: str | None
    """``Left`` or ``Right``, if the name has one of these words."""


ANATOMY, ABNORMAL, GENERIC = "AnatomicalStructure", "MorphologicallyAbnormalStructure", "Tissue"

ANATOMIES = (
    *("adrenal gland", "aorta", "bladder", "brain", "colon", "duodenum", "esophagus", "gallbladder", "heart"),
    *("hippocampus", "inferior vena cava", "kidney", "left atrium", "left ventricle", "liver", "lung", "pancreas"),
    *("prostate", "right atrium", "right ventricle", "spinal cord", "spleen", "stomach", "trachea"),
)
"""Names that form pydicom's keyword when joined."""

CODES: dict[str, tuple[str, str]] = {
    **{name: (ANATOMY, name.title().replace(" ", "")) for name in ANATOMIES},
    "urinary bladder": (ANATOMY, "Bladder"),
    "vessel": (ANATOMY, "BloodVessel"),
    **dict.fromkeys(("cancer", "tumor", "tumour"), (ABNORMAL, "Neoplasm")),
    **dict.fromkeys(("edema", "oedema"), (ABNORMAL, "Edema")),
    "lesion": (ABNORMAL, "Lesion"),
    "necrosis": (ABNORMAL, "Necrosis"),
}
"""Category and code of a name in lower case, with separate words, without left and right."""


def code_name(name: str) -> CodedName:
    """Return the codes for a label's name; generic codes for an unknown name.

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
