"""Read DICOM label maps, segmentations (SEG) and structure sets (RTSTRUCT), on the voxel grid of their image.

Neither defines the voxels of its image: a segmentation may leave out empty slices, a structure set has contours in mm.
Both are therefore read on the grid of the image. The task maps the names of segments to the values of labels, since the
numbers of segments differ between files. Undeclared segments are left out.

highdicom is optional (``pip install highdicom``), includes pydicom, and is imported when such a label is opened.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import MetaTensor

from volseg.data.cases import Task
from volseg.data.dicom.elements import TAGS, Tag, read_header
from volseg.data.itk import lps_to_ras
from volseg.data.volume import as_volume, require_memory
from volseg.errors import ConfigError, ReaderError
from volseg.formatting import list_some
from volseg.transforms.grid import MISPLACED_VOXELS, Grid

KINDS = {"SEG": "segmentation", "RTSTRUCT": "structure set"}
SERIES_OF = {
    "SEG": ("ReferencedSeriesSequence",),
    "RTSTRUCT": ("ReferencedFrameOfReferenceSequence", "RTReferencedStudySequence", "RTReferencedSeriesSequence"),
}
"""Nested sequences that contain the UID of the series."""

NAMED_IN = {
    "SEG": ("SegmentSequence", "SegmentNumber", "SegmentLabel"),
    "RTSTRUCT": ("StructureSetROISequence", "ROINumber", "ROIName"),
}
"""Sequence of the segments, and the elements for the number and the name of each."""

SEGMENT = "SegmentIdentificationSequence"

PLACED_BY = ("PlanePositionSequence", "PlaneOrientationSequence", "PixelMeasuresSequence")
"""Sequences that place a frame of a segmentation; each is stored per frame or shared by all frames."""

OTHERS = (".gz", ".nii", ".mha", ".mhd", ".nrrd", ".nhdr")
"""Suffixes of other formats; files with these need not be opened."""

CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")
DECIMALS = 3
"""Decimals of a voxel to which contours are rounded: a point exported at a voxel's centre returns there."""

Voxels = tuple[np.ndarray, ...]
"""Indices along the three axes."""


def import_highdicom() -> Any:
    """Return highdicom.

    Raises
    ------
    ConfigError
        If it is not installed.
    """
    try:
        import highdicom  # optional, and takes half a second
        import highdicom.seg
    except ImportError as fault:
        raise ConfigError(
            f"a DICOM segmentation needs highdicom ({fault}); install it: pip install highdicom"
        ) from fault
    return highdicom


def find_dicom_label(path: Path) -> Path | None:
    """Return the file of a DICOM segmentation or structure set: ``path``, or a folder's only file; None for others."""
    if path.is_dir():
        files = [file for file in path.iterdir() if not file.name.startswith(".")]
        path = files[0] if len(files) == 1 else path
    return path if _read_text(path, TAGS["Modality"]) in KINDS else None


def read_image_text(path: Path, tag: Tag = TAGS["SeriesInstanceUID"]) -> str:
    """Return the UID of an image's series, or another text of its first file; "" if it is not a DICOM image."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return next((text for file in files if find_dicom_label(file) is None and (text := _read_text(file, tag))), "")


def _read_text(path: Path, tag: Tag) -> str:
    if path.suffix.lower() in OTHERS or not path.is_file():
        return ""
    try:
        header = read_header(path, [tag], to_end=False)
    except ReaderError:  # its reader reports the fault
        return ""
    return "" if header is None else header.top.text(tag)


@dataclass(frozen=True, kw_only=True)
class DicomLabel:
    """A segmentation or structure set."""

    path: Path
    dataset: Any
    """Data set of pydicom."""

    @classmethod
    def open(cls, path: Path) -> "DicomLabel | None":
        """Return the label of a path, or None if `find_dicom_label` finds none.

        Raises
        ------
        ReaderError
            If the file is damaged.
        """
        if (file := find_dicom_label(path)) is None:
            return None
        import_highdicom()
        import pydicom  # a dependency of highdicom

        read_header(file, frozenset())  # refuses truncated files, of which pydicom reads a part
        return cls(path=file, dataset=pydicom.dcmread(file))

    @property
    def series(self) -> str:
        """UID of the segmented series; "" if the file has none."""
        item = self.dataset
        for keyword in SERIES_OF[self.dataset.Modality]:
            item = next(iter(item.get(keyword) or ()), {})
        return str(item.get("SeriesInstanceUID", ""))

    @property
    def names(self) -> dict[int, str]:
        """Name of each segment by its number."""
        sequence, number, name = NAMED_IN[self.dataset.Modality]
        return {int(item[number].value): str(item.get(name, "")) for item in self.dataset.get(sequence) or ()}

    def __str__(self) -> str:
        count = f"{len(self.names)} segment{'s' * (len(self.names) != 1)}"
        return f"{KINDS[self.dataset.Modality]} of series {self.series or 'unknown'}, {count}"

    def read(self, grid: Grid, task: Task) -> MetaTensor:
        """Return the label map ``(1, D, H, W)`` on an image's grid, with the task's values for the names.

        With regions, the regions are painted in their order, and labels over them.

        Raises
        ------
        ReaderError
            If no segment has a declared name, two overlap in a task without regions, or one is not on the image's grid.
        """
        path = self.path
        require_memory(8 * int(np.prod(grid.shape)), path)
        regions = zip(task.regions, task.output_values, strict=True) if task.regions else ()
        ignored = {} if task.ignore is None else {task.ignore: "ignore"}
        order = [*regions, *((name, value) for value, name in {**task.foreground, **ignored}.items())]
        numbers = defaultdict(list)
        for number, name in self.names.items():
            numbers[_simplify(name)].append(number)
        voxels = np.zeros(grid.shape, dtype=np.int32)
        if not any(_simplify(name) in numbers for name, _ in order):
            raise ReaderError(
                f"{path} is a {self}, called {list_some(list(self.names.values()))}, but {task.name} declares "
                f"{list_some([name for name, _ in order])}; use the segments' names as labels in its dataset.json"
            )
        read_voxels = self._read_segment if self.dataset.Modality == "SEG" else self._read_contours
        for name, value in order:
            for place in (place for number in numbers.get(_simplify(name), ()) for place in read_voxels(number, grid)):
                there = voxels[place]
                if not task.regions and (count := int(((there != 0) & (there != value)).sum())):
                    raise ReaderError(
                        f"{path}: {name!r} overlaps another segment in {count} voxel(s), but a label map has one value "
                        "per voxel; declare regions, which are painted in their order"
                    )
                voxels[place] = value
        return as_volume(voxels[None], grid.affine.numpy(), path, stored=voxels.dtype)

    @cached_property
    def _frames(self) -> list[tuple[int, int | None, np.ndarray]]:
        """Number, segment (None in a LABELMAP) and affine of each frame, cached: a file has up to 10^5 frames."""
        hd, found = import_highdicom(), []
        made = hd.seg.Segmentation.from_dataset(self.dataset, copy=False)  # converts the data set in place
        shared = made.SharedFunctionalGroupsSequence[0]
        for frame, groups in enumerate(made.PerFrameFunctionalGroupsSequence, start=1):
            at, turn, sides = ((groups.get(name) or shared[name].value)[0] for name in PLACED_BY)
            given = at.ImagePositionPatient, turn.ImageOrientationPatient, sides.PixelSpacing
            segment = groups.get(SEGMENT) or shared.get(SEGMENT) or [{}]
            found.append(
                (
                    frame,
                    segment[0].get("ReferencedSegmentNumber"),
                    hd.spatial.PixelToReferenceTransformer(*given).affine,
                )
            )
        return found

    def _read_segment(self, number: int, grid: Grid) -> Iterator[Voxels]:
        """Yield the voxels of a segment frame by frame, since highdicom cannot build the volume of a tilted gantry."""
        if self.dataset.SegmentationType == "FRACTIONAL":
            raise ReaderError(f"{self.path} is a FRACTIONAL segmentation; convert it to BINARY")
        for frame, segment, to_mm in self._frames:
            if segment not in (number, None):
                continue
            is_inside = self.dataset.get_stored_frame(frame) == (1 if segment else number)
            to_grid = np.linalg.solve(grid.affine.numpy(), lps_to_ras(to_mm))[:3]
            at = to_grid[:, :2] @ np.argwhere(is_inside.T).T + to_grid[:, 3:]
            place = at.round().astype(np.int64)
            apart, steps = float(np.abs(at - place).max(initial=0)), np.abs(to_grid[:, :2].round()).sum(0)
            if apart > MISPLACED_VOXELS or not (steps == 1).all():
                raise ReaderError(
                    f"{self.path} is not on its image's grid: it is up to {apart:.2g} voxels away, at most "
                    f"{MISPLACED_VOXELS:g} are allowed; name the segmentation of this series, or resample it"
                )
            if (place < 0).any() or (place >= np.array(grid.shape)[:, None]).any():
                raise ReaderError(f"{self.path} has voxels outside its image; name the label of this image")
            yield tuple(place)

    def _read_contours(self, number: int, grid: Grid) -> Iterator[Voxels]:
        """Yield the voxels of a region of interest, plane by plane."""
        planes: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        for region in self.dataset.get("ROIContourSequence") or ():
            for item in (region.get("ContourSequence") or ()) if region.ReferencedROINumber == number else ():
                if item.get("ContourGeometricType") in CLOSED:
                    axis, plane, points = self._place_contour(np.array(item.ContourData, dtype=np.float64), grid)
                    planes[axis, plane].append(points)
        for (axis, plane), contours in planes.items():
            rows, columns = (side for other, side in enumerate(grid.shape) if other != axis)
            place = list(np.nonzero(fill_contours(contours, (rows, columns))))
            place.insert(axis, np.full_like(place[0], plane))
            yield tuple(place)

    def _place_contour(self, numbers: np.ndarray, grid: Grid) -> tuple[int, int, np.ndarray]:
        """Return the axis across a contour, its plane along this axis, and its points ``(N, 2)`` there (voxels)."""
        if len(numbers) % 3 or len(numbers) < 9:
            raise ReaderError(f"{self.path} has a contour that is not three or more points (x, y, z); export it again")
        positions = lps_to_ras(np.concatenate([numbers.reshape(-1, 3).T, np.ones((1, len(numbers) // 3))]))
        points = np.linalg.solve(grid.affine.numpy(), positions)[:3].T
        planes = points.mean(axis=0).round()
        away = np.abs(points - planes).max(axis=0)
        axis = int(away.argmin())  # not by extents: a contour without an area has no extent along several axes
        plane, apart = int(planes[axis]), float(away[axis])
        if apart > MISPLACED_VOXELS or not 0 <= plane < grid.shape[axis]:
            raise ReaderError(
                f"{self.path} has a contour at {numbers[:3].tolist()} mm, {apart:.2g} voxels from plane {plane} of "
                f"{grid.shape[axis]} of its image (at most {MISPLACED_VOXELS:g}); name the structure set of this series"
            )
        return axis, plane, np.delete(points, axis, axis=1).round(DECIMALS)


def _simplify(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def fill_contours(contours: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Return a mask of the voxels of a plane with centres inside closed contours, by the even-odd rule.

    A contour inside another is a hole. Where a contour crosses a row, all later voxels of the row change sides. A
    centre on a contour belongs to the side of larger indices.

    Parameters
    ----------
    contours : sequence of array
        Points ``(N, 2)`` as (row, column); voxel centres are integers.
    shape : tuple of int
        Rows and columns.

    Examples
    --------
    >>> fill_contours([np.array([[0.5, 0.5], [0.5, 2.5], [1.5, 2.5], [1.5, 0.5]])], (2, 4)).astype(int).tolist()
    [[0, 0, 0, 0], [0, 1, 1, 0]]
    """
    rows, columns = shape
    toggles = np.zeros((rows, columns + 1), dtype=np.int64)
    for points in contours:
        (y, x), (next_y, next_x) = points.T, np.roll(points, -1, axis=0).T
        first = np.ceil(np.minimum(y, next_y)).clip(0, rows).astype(np.int64)
        count = np.ceil(np.maximum(y, next_y)).clip(0, rows).astype(np.int64) - first
        edge = np.repeat(np.arange(len(points)), count)
        row = np.arange(len(edge)) - np.repeat(count.cumsum() - count, count) + first[edge]
        crossing = x[edge] + (row - y[edge]) * (next_x - x)[edge] / (next_y - y)[edge]
        np.add.at(toggles, (row, np.ceil(crossing).clip(0, columns).astype(np.int64)), 1)
    filled: np.ndarray = toggles[:, :-1].cumsum(axis=1) % 2 == 1
    return filled


SIDES = (((-1, 0), (0, 0), (0, 1)), ((0, 1), (0, 1), (1, 1)), ((1, 0), (1, 1), (1, 0)), ((0, -1), (1, 0), (0, 0)))
"""Sides of a voxel: the neighbour beyond, and the first and last corner of the side, clockwise."""


def trace_contours(mask: np.ndarray) -> Iterator[np.ndarray]:
    """Yield closed contours ``(N, 2)`` along the sides of the voxels of a plane; `fill_contours` restores the mask.

    The contours are half a voxel from all centres, so that rounding has no effect.
    """
    following: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    padded = np.pad(mask, 1)
    for (down, right), begin, end in SIDES:
        beyond = padded[1 + down : len(padded) - 1 + down, 1 + right : padded.shape[1] - 1 + right]
        for row, column in np.argwhere(mask & ~beyond).tolist():
            following[row + begin[0], column + begin[1]].append((row + end[0], column + end[1]))
    while following:
        corners = [next(iter(following))]
        while True:
            ends = following[corners[-1]]
            corner = ends.pop()
            if not ends:
                del following[corners[-1]]
            if corner == corners[0]:
                break
            corners.append(corner)
        points = np.array(corners) - 0.5
        turns = (points - np.roll(points, 1, axis=0) != np.roll(points, -1, axis=0) - points).any(axis=1)
        yield points[turns]
