"""Write cases as one page in which NiiVue shows slices in three planes, with label maps over them.

The page is self-contained and includes the compressed volumes. A volume that is too large for a page is thinned: every
n-th voxel along the axes with the finest spacing is kept, so that the file contains each value shown. The page states
the resulting spacing.

The repository does not contain NiiVue. ``make viewer`` and the build of a wheel fetch the package by npm, compare its
hash, and keep one of its files next to this module. None of its code runs on this machine.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from isal import igzip
from monai.data import MetaTensor
from nibabel.affines import voxel_sizes

from volseg.data.cases import LARGEST_VALUE, Task
from volseg.data.labels import choose_colour
from volseg.data.readers import Files, name_files, read_label, read_volume
from volseg.errors import ConfigError, DataError
from volseg.files import replacing
from volseg.reporting.page import read_part, write_document
from volseg.transforms.grid import Grid
from volseg.version import __version__

MOST_OF_CASE, MOST_OF_PAGE = 2**25, 2**27
"""Voxels of an image: 512 x 512 x 128, and four such images, take 50 to 200 MB in a page."""

FEWEST = 2**21
"""Voxels (128 x 128 x 128) below which an image is not thinned; fewer cases then fit."""

COMPRESSION = 2
"""Compression level of ISA-L."""


@dataclass(frozen=True, kw_only=True)
class ViewedCase:
    """An image and the label maps that are shown over it."""

    name: str
    image: Files
    layers: Mapping[str, Path] = field(default_factory=dict)
    """Label map files by title, such as ``prediction``."""
    dice: float = math.nan
    """Mean over the labels; NaN if unknown."""


def write_viewer(
    cases: Sequence[ViewedCase],
    file: str | Path,
    *,
    title: str,
    names: Mapping[int, str],
    task: Task | None = None,
    channel: int = 0,
) -> Path:
    """Write the page atomically; return its path.

    Parameters
    ----------
    cases : sequence of ViewedCase
        In the order of the page's list.
    file : path
        Of the page.
    title : str
        Of the page.
    names : mapping
        Names of labels by value; other labels appear by their value.
    task : Task, optional
        Maps segments of DICOM files to label values; see `read_label`.
    channel : int
        Channel of the images to show, from 0.

    Raises
    ------
    ConfigError
        NiiVue was not fetched, a page cannot hold this many cases, or an image lacks this channel.
    DataError
        A volume cannot be read, or a file is not a label map or not on the grid of its image.
    """
    scripts = [read_niivue(), read_part("viewer.js")]
    page = _Page(names, task, channel, most=min(MOST_OF_CASE, MOST_OF_PAGE // len(cases)))
    described = json.dumps({"cases": [*map(page.add, cases)], "labels": [*page.list_labels()]})
    blocks = {"viewed": described.replace("<", "\\u003c"), **page.blocks}
    text = write_document("viewer", scripts, title=title, version=__version__, blocks=blocks)
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")
    return Path(file)


class _Page:
    """The volumes of a page, and the labels that occur in them."""

    def __init__(self, names: Mapping[int, str], task: Task | None, channel: int, most: int) -> None:
        self._names, self._task, self._channel, self._most = names, task, channel, most
        self._indices: dict[int, int] = {value: index for index, value in enumerate(sorted(names), start=1)}
        self._found: set[int] = set()
        self.blocks: dict[str, str] = {}

    def list_labels(self) -> Iterator[dict[str, Any]]:
        """Yield name and colour of each index, from 1, and whether it occurs."""
        for value in self._indices:
            name = self._names.get(value, f"label {value}")
            yield {"name": name, "colour": choose_colour(value), "occurs": value in self._found}

    def add(self, case: ViewedCase) -> dict[str, Any]:
        """Store the volumes of a case; return its description for the page's script."""
        image = read_volume(case.image)
        if not 0 <= self._channel < len(image):
            raise ConfigError(f"{name_files(case.image)} has {len(image)} channel(s) (0-based), got {self._channel}")
        grid = Grid.of(image)
        steps = self._choose_steps(grid, case.name)
        affine = grid.affine.numpy() @ np.diag([*steps, 1])
        slices = tuple(slice(None, None, step) for step in steps)
        stored = image[self._channel].numpy(force=True)[slices]
        voxels = np.nan_to_num(stored, nan=0.0, posinf=0.0, neginf=0.0)
        is_finite = bool(np.isfinite(stored).all())
        layers: list[dict[str, str]] = []
        centre = [side // 2 for side in voxels.shape]
        for title, file in case.layers.items():
            indices = self._index(read_label(file, image, self._task), grid, file)[slices]
            if not layers and len(places := np.argwhere(indices)):
                middle = np.median(places, axis=0)
                centre = places[np.abs(places - middle).sum(axis=1).argmin()].tolist()
            layers.append({"title": title, "volume": self._pack(indices, affine)})
        low, high = np.iinfo(np.int16).min, np.iinfo(np.int16).max
        is_short = low <= voxels.min() <= voxels.max() <= high and np.array_equal(voxels, voxels.round())
        return {
            "title": case.name if math.isnan(case.dice) else f"{case.name} (Dice {case.dice:.3f})",
            "note": _describe(grid, steps) + ("" if is_finite else " Values that are not finite are shown as 0."),
            "centre": (affine @ [*centre, 1])[:3].tolist(),
            "image": self._pack(voxels.astype(np.int16) if is_short else voxels, affine),
            "layers": layers,
        }

    def _choose_steps(self, grid: Grid, name: str) -> list[int]:
        """Return the step between kept voxels along each axis."""
        steps = [1, 1, 1]
        while math.prod(-(-side // step) for side, step in zip(grid.shape, steps, strict=True)) > self._most:
            if self._most < FEWEST:
                raise ConfigError(
                    f"a page can hold {MOST_OF_PAGE:,} voxels, too few for this many cases ({name} has "
                    f"{math.prod(grid.shape):,}); choose fewer by --case"
                )
            steps[int(np.argmin(_find_spacing(grid) * steps))] += 1
        return steps

    def _index(self, labels: MetaTensor, grid: Grid, file: Path) -> np.ndarray:
        """Return a label map with the page's indices in place of the values."""
        if fault := grid.fault_of(Grid.of(labels), "image"):
            raise DataError(f"{file} {fault}; a label map must be on the grid of its image")
        values = labels[0].numpy(force=True)
        found = np.unique(values)
        if not (0 <= found[0] <= found[-1] <= LARGEST_VALUE and np.array_equal(found, found.round())):
            raise DataError(f"{file} has {found[0]:g} to {found[-1]:g}, not whole numbers from 0 to {LARGEST_VALUE}")
        table = np.zeros(int(found[-1]) + 1, dtype=np.uint16)
        for value in map(int, found[found > 0]):
            table[value] = self._indices.setdefault(value, len(self._indices) + 1)
            self._found.add(value)
        return table[values.astype(np.int64)]

    def _pack(self, voxels: np.ndarray, affine: np.ndarray) -> str:
        """Store a volume as a block of NIfTI; return the name of the block."""
        name = f"v{len(self.blocks)}"
        content = nib.Nifti1Image(voxels, affine).to_bytes()
        self.blocks[name] = base64.b64encode(igzip.compress(content, COMPRESSION, mtime=0)).decode()
        return name


def _describe(grid: Grid, steps: Sequence[int]) -> str:
    spacing = _find_spacing(grid)
    whole = f"{' x '.join(map(str, grid.shape))} voxels of {_join(spacing)} mm"
    if max(steps) == 1:
        return f"{whole}."
    return f"Thinned to {_join(spacing * steps)} mm; the file has {whole}."


def _find_spacing(grid: Grid) -> np.ndarray:
    return voxel_sizes(grid.affine.numpy())


def _join(lengths: np.ndarray) -> str:
    return " x ".join(f"{length:.3g}" for length in lengths)


SCRIPT = Path(__file__).with_name("niivue.js")
"""The script that draws volumes in a browser."""


def read_niivue() -> str:
    """Return the script.

    Raises
    ------
    ConfigError
        It was not fetched; the message gives the command.
    """
    if not SCRIPT.is_file():
        raise ConfigError(
            f"volseg view needs NiiVue, but {SCRIPT} is missing. Wheels contain it; in a checkout, run make viewer "
            "once (needs npm)"
        )
    return SCRIPT.read_text(encoding="utf-8")
