"""Find the DICOM series in and below a folder, their names, and the images among them.

A series is represented by one of its files, the first: several series may share a folder, as in exports of a PACS.
Scouts, structure sets, segmentations, reports and screenshots are recognised by their headers, and left out unless
requested.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from volseg.data.dicom.elements import TAGS, WANTED, Header, Item, damaged, decode_text, read_header
from volseg.errors import DataError, ReaderError
from volseg.formatting import list_duplicates, list_some

KEYWORDS = (
    *("SpecificCharacterSet", "ImageType", "StudyDate", "Modality", "SeriesDescription", "PatientID"),
    *("SeriesInstanceUID", "SeriesNumber", "ImageOrientationPatient", "NumberOfFrames", "Rows"),
)
"""Elements that identify and describe a series."""

DERIVED = frozenset({"SEG", "RTSTRUCT", "RTDOSE", "RTPLAN", "RTIMAGE", "SR", "DOC", "PR", "KO", "REG"})
"""Modalities of objects derived from images: segmentations, structure sets, doses, plans, reports, and so on."""

SCOUT = re.compile(r"\b(scout|locali[sz]er|topogram|surview|survey|scanogram)s?\b", re.IGNORECASE)
UTF_8 = "ISO_IR 192"
LONGEST_PART = 40
"""Longest part of a name, in letters."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The files of one series in one folder."""

    uid: str
    files: tuple[Path, ...]
    """Sorted by name, which may differ from the order of the slices."""
    patient: str
    date: str
    """Date of the study, as YYYYMMDD."""
    number: str
    description: str
    modality: str
    left_out: str = ""
    """Description of the object, if it is not an image to segment."""

    @property
    def first(self) -> Path:
        """Path that represents the series."""
        return self.files[0]

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self.files[0].parent

    def __str__(self) -> str:
        told = " ".join(part for part in (self.modality, repr(self.description) if self.description else "") if part)
        return f"{self.uid} ({told or 'without description'}, {len(self.files)} file(s) in {self.folder})"


@dataclass(frozen=True, kw_only=True)
class FoundSeries:
    """DICOM series of some files."""

    images: tuple[Series, ...]
    others: tuple[Series, ...]
    """Series with a description in ``left_out``."""
    damaged: tuple[Path, ...]
    """Files with the suffix ``.dcm`` that are not DICOM."""


def search_series(folder: Path) -> FoundSeries:
    """Return the series in and below a folder, in the order of their folders; hidden files and folders are skipped.

    Only the first elements of each file are read.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files.extend(Path(parent, name) for name in sorted(names) if not name.startswith("."))
    return gather_series(files)


def gather_series(files: Iterable[Path]) -> FoundSeries:
    """Return the DICOM series among ``files``; other files are skipped.

    Raises
    ------
    DataError
        If the files of a series are in several folders.
    """
    headers: dict[tuple[Path, str], dict[Path, Item]] = defaultdict(dict)
    unread = []
    tags = [TAGS[keyword] for keyword in KEYWORDS]
    for file in files:
        try:
            found = read_header(file, tags, to_end=False)
        except ReaderError:  # its reader reports the fault
            found = None
        if found is not None and TAGS["SeriesInstanceUID"] in found.top.elements:
            headers[file.parent, found.top.text(TAGS["SeriesInstanceUID"])][file] = found.top
        elif found is None and file.suffix.lower() == ".dcm":
            unread.append(file)
    if torn := list_duplicates(uid for _, uid in headers):
        folders = [str(folder) for folder, uid in headers if uid == torn[0]]
        raise DataError(
            f"series {torn[0]} is spread over {len(folders)} folders, {list_some(folders)}; put its files into one, or "
            "name one of these folders"
        )
    series = [_describe(uid, of) for (_, uid), of in headers.items()]
    return FoundSeries(
        images=tuple(one for one in series if not one.left_out),
        others=tuple(one for one in series if one.left_out),
        damaged=tuple(unread),
    )


def choose_series(found: FoundSeries, wanted: Sequence[str], where: Path | str) -> tuple[Series, ...]:
    """Return the images, or the series that match ``wanted`` by UID or by a part of the description, in any case.

    Raises
    ------
    DataError
        If there is no such series; names the series found.
    """
    everything = (*found.images, *found.others)
    if wanted:
        chosen = tuple(
            series
            for series in everything
            if any(text == series.uid or text.casefold() in series.description.casefold() for text in wanted)
        )
    else:
        chosen = found.images
    if not chosen:
        asked = f"no series matches {' or '.join(map(repr, wanted))}" if wanted else "no series is an image"
        told = [f"{series}{f': {series.left_out}' if series.left_out else ''}" for series in everything]
        raise DataError(
            f"{where}: {asked}; found: {list_some(told, 10) or 'none'}. Choose with --series UID, or a part of a "
            "description"
        )
    return chosen


def name_series(chosen: Sequence[Series]) -> dict[str, Series]:
    """Return each series under a valid file name: patient, date of the study, number and description.

    Equal names get a suffix: eight digits of a digest of the UID.
    """
    names = [_name(series) for series in chosen]
    doubled = set(list_duplicates(names))
    return {
        f"{name}_{blake2b(series.uid.encode(), digest_size=4).hexdigest()}" if name in doubled else name: series
        for name, series in zip(names, chosen, strict=True)
    }


def _name(series: Series) -> str:
    parts = (series.patient or "patient", series.date, series.number, series.description)
    plain = (re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-.")[:LONGEST_PART] for part in parts)
    return "_".join(part for part in plain if part) or "series"


def _describe(uid: str, headers: Mapping[Path, Item]) -> Series:
    first = next(iter(headers.values()))
    encoding = "utf-8" if first.text(TAGS["SpecificCharacterSet"]) == UTF_8 else "latin-1"
    patient, description = (decode_text(first.value(TAGS[key]), encoding) for key in ("PatientID", "SeriesDescription"))
    modality = first.text(TAGS["Modality"])
    return Series(
        uid=uid,
        files=tuple(headers),
        patient=patient,
        date=first.text(TAGS["StudyDate"]),
        number=first.text(TAGS["SeriesNumber"]),
        description=description,
        modality=modality,
        left_out=_classify(list(headers.values()), modality, description),
    )


def _classify(headers: Sequence[Item], modality: str, description: str) -> str:
    """Return the kind of a series, if it is not an image to segment."""

    def has(*keywords: str) -> bool:
        return any(TAGS[keyword] in header.elements for header in headers for keyword in keywords)

    if modality in DERIVED:
        return f"derived from images ({modality})"
    if not has("Rows"):
        return "not an image"
    if all("LOCALIZER" in header.text(TAGS["ImageType"]).split("\\") for header in headers):
        return "a localizer"
    if SCOUT.search(description):
        return "a localizer, by its description"
    return "" if has("ImageOrientationPatient", "NumberOfFrames") else "an image without a place in the patient"


def list_slices(path: Path) -> list[Path]:
    """Return the files of the only series in a folder, or of the series that a file belongs to, sorted by name.

    Hidden files and files without an image, such as structure sets and ``DICOMDIR``, are left out.

    Raises
    ------
    ReaderError
        If there is no series, there are several, or a file is not DICOM.
    """
    folder = path if path.is_dir() else path.parent
    series, unread = _sort_by_series(folder, path)
    if path.is_dir():
        if not series:
            raise ReaderError(f"{folder} contains no readable DICOM series; name the folder with the slices")
        if len(series) > 1:
            found = "; ".join(
                f"{uid or 'no SeriesInstanceUID'} ({len(files)} files, {files[0].name} ...)"
                for uid, files in sorted(series.items())
            )
            raise ReaderError(f"{folder} contains {len(series)} DICOM series: {found}; put each into its own folder")
        [slices] = series.values()
    else:
        slices = next((files for uid, files in series.items() if uid and path in files), [])
        if not slices and path not in unread:
            raise ReaderError(f"{path} is not a slice of a DICOM series; name the folder with the slices")
    if unread:  # it may belong to this series, which would silently lack a slice
        raise damaged(unread[0])
    return slices


def _sort_by_series(folder: Path, path: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the image files of each series in a folder by UID, and the other files that may belong to a series.

    If ``path`` is a folder, segmentations next to its images are left out.
    """
    series: dict[str, list[Path]] = defaultdict(list)
    labels: dict[str, list[Path]] = defaultdict(list)
    unread, others = [], []
    for file in sorted(folder.iterdir()):
        if file.is_dir() or file.name.startswith("."):
            continue
        found = read_header(file, [TAGS[key] for key in ("Modality", "SeriesInstanceUID", "Rows")], to_end=False)
        if found is None:
            unread += [file] if file.suffix.lower() == ".dcm" else []
            continue
        uid = found.top.text(TAGS["SeriesInstanceUID"])
        # If elements are out of order, a read that ends early may miss some.
        if TAGS["Rows"] in found.top.elements or require_header(file).pixels is not None:
            (labels if found.top.text(TAGS["Modality"]) == "SEG" else series)[uid].append(file)
        elif file.name.upper() != "DICOMDIR":
            others.append((uid, file))
    series = series if series and path.is_dir() else series | labels  # the reader reports a segmentation
    return series, unread + [file for uid, file in others if not uid or uid in series]


def require_header(file: Path) -> Header:
    """Return the header of a file that was DICOM when its folder was listed."""
    header = read_header(file, WANTED)
    if header is None:
        raise damaged(file)
    return header
