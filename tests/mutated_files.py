"""Damage image files in seeded ways, read each in a process of limited memory, and compare with other readers.

python tests/mutated_files.py nii 0 300 FOLDER     # tells what became of each of 300 files

A file must be refused by a `ReaderError`, or read as nibabel (NIfTI) or SimpleITK (the others) reads it without our
checks. A process ends itself if a file takes a minute, 2 GiB of address space more, or 400 MiB of memory in all.
"""

import faulthandler
import gzip
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

VOXELS = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
SILENCE = 60.0
"""Seconds for one file, after which a process hangs."""

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1)
TEXTS = ("-1", "0", "99999", "2147483648", "9" * 30, "9" * 4000, "nan", "inf")
TEXTS += ("1e400", "(1,2", "%s%n", "", "\0", "a:b=c")
ADDED_BYTES = 400 << 20
"""What reading may add to the process: ITK and torch's threads take some."""


def sound_files(kind: str, folder: Path) -> list[bytes]:
    """Return sound images of a kind: other types of voxels, byte orders, channels; DICOM: one slice of three.

    The last one lies in the folder, at `path_of`, with the files that belong to it.
    """
    path = path_of(kind, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind.startswith("nii"):
        return [_write_nifti(image, path) for image in _draw_nifti()]
    import SimpleITK  # large, and not for NIfTI

    if kind == "dicom":
        _write_series(SimpleITK.GetImageFromArray(VOXELS.T), path)
        return [path.read_bytes()]
    contents = []
    for dtype in (np.uint8, np.float32, np.float64, np.int16):  # all of them in one file beside a detached header
        image = SimpleITK.GetImageFromArray(VOXELS.T.astype(dtype))
        SimpleITK.WriteImage(image, str(path), useCompression=kind in ("nrrd", "mha"))
        contents.append(path.read_bytes())
    return contents if kind in ("nrrd", "mha") else contents[-1:]


def path_of(kind: str, folder: Path) -> Path:
    """Return the file of a kind that is damaged."""
    return folder / {"dicom": "series/1.dcm"}.get(kind, f"sound.{kind}")


def _draw_nifti() -> Iterator[nibabel.Nifti1Image]:
    affine = np.array([[0, 0.8, 0, -10], [-0.9, 0, 0, 20], [0, 0, 2.5, 5], [0, 0, 0, 1.0]])
    yield nibabel.Nifti2Image(VOXELS.astype(np.float32), affine)
    yield nibabel.Nifti1Image(np.stack([VOXELS, VOXELS + 1], -1), affine)
    swapped = nibabel.Nifti1Header(endianness=">")
    swapped.set_data_dtype(np.int16)
    yield nibabel.Nifti1Image(VOXELS, affine, swapped)
    scaled = nibabel.Nifti1Image(VOXELS, affine)
    scaled.header.set_slope_inter(0.5, -3)
    yield scaled
    yield nibabel.Nifti1Image(VOXELS.astype(np.uint8), np.eye(4))
    yield nibabel.Nifti1Image(VOXELS, np.eye(4))


def _write_nifti(image: nibabel.Nifti1Image, path: Path) -> bytes:
    nibabel.save(image, path)
    return path.read_bytes()


def _write_series(image: Any, path: Path) -> None:
    import SimpleITK  # large, and not for NIfTI

    writer = SimpleITK.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for index in range(3):
        piece = image[:, :, index : index + 1]
        for tag, value in (("0008|0060", "MR"), ("0020|000e", "1.2.3"), ("0008|0018", f"1.2.3.{index}")):
            piece.SetMetaData(tag, value)
        writer.SetFileName(str(path.parent / f"{index}.dcm"))
        writer.Execute(piece)


def mutate(content: bytes, kind: str, seed: int) -> bytes:
    """Return the content with one to three faults in its header, or in what is packed behind it."""
    draw = random.Random(seed)
    if kind == "nii.gz" and draw.random() < 0.7:  # of those damaged behind the packing nearly all fail gzip's checksum
        return gzip.compress(mutate(gzip.decompress(content), "nii", seed), mtime=0)
    header = {"nii": 544, "nii.gz": len(content), "dicom": len(content)}.get(kind) or content.find(b"\n\n") + 2
    if kind in ("mha", "mhd"):
        header = content.find(b"\n", content.find(b"ElementDataFile")) + 1
    if kind in ("nhdr", "mhd"):
        header = len(content)
    for _ in range(draw.randint(1, 3)):
        if not content:
            break  # a fault before has cut all of it off
        content = draw.choice(TEXT_FAULTS if kind in ("nrrd", "nhdr", "mha", "mhd") else FAULTS)(content, header, draw)
    return content


def _flip(content: bytes, header: int, draw: random.Random) -> bytes:
    place = draw.randrange(min(header, len(content)) or 1)
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def _set_number(content: bytes, header: int, draw: random.Random) -> bytes:
    size = draw.choice((1, 2, 4))
    place = draw.randrange(max(1, min(header, len(content)) - size))
    number = (draw.choice(NUMBERS) % 256**size).to_bytes(size, draw.choice(("little", "big")))
    return content[:place] + number + content[place + size :]


def _cut(content: bytes, header: int, draw: random.Random) -> bytes:
    del header
    return content[: draw.randrange(len(content))] or b"\0"


def _set_text(content: bytes, header: int, draw: random.Random) -> bytes:
    numbers = [*re.finditer(rb"[-+.\w]+", content[:header])]
    if not numbers:
        return content
    chosen = draw.choice(numbers)
    return content[: chosen.start()] + draw.choice(TEXTS).encode() + content[chosen.end() :]


def _move_line(content: bytes, header: int, draw: random.Random) -> bytes:
    lines = content[:header].split(b"\n")
    line = draw.choice(lines)
    if draw.random() < 0.5:
        lines.remove(line)
    else:
        lines.insert(draw.randrange(len(lines)), line * draw.choice((1, 1, 100)))
    return b"\n".join(lines) + content[header:]


FAULTS = (_flip, _set_number, _set_number, _cut)
TEXT_FAULTS = (_flip, _cut, _set_text, _set_text, _set_text, _move_line)


def read_files(kind: str, first: int, last: int, folder: Path) -> None:
    """Read the mutated files, and say of each what came: a volume, a refusal, another exception, or other voxels."""
    from volseg.data.readers import read_volume
    from volseg.errors import ReaderError

    contents = sound_files(kind, folder)
    path = path_of(kind, folder)
    read = path.parent if kind == "dicom" else path
    for content in contents:
        path.write_bytes(content)
        assert compare(read_volume(read), read) is None
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), limit))
    before, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for seed in range(first, last):
        faulthandler.dump_traceback_later(SILENCE, exit=True)
        begun = time.monotonic()
        path.write_bytes(mutate(contents[seed % len(contents)], kind, seed))
        sys.stdout.write(f"{seed} ")
        sys.stdout.flush()  # the process may end in what follows
        volume = None
        try:
            volume = read_volume(read)
        except ReaderError as fault:
            became = f"refused {type(fault).__name__}: {fault}".replace("\n", " ")
        except BaseException as fault:
            became = f"RAISED {fault!r}"
        else:
            became = "read"
        added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert added < ADDED_BYTES, f"{added} bytes more in the process after seed {seed}"
        if volume is not None and (difference := compare(volume, read)):
            became = f"DIFFERS {difference}"
        sys.stdout.write(f"{became}\n")
        slowest = max(slowest, time.monotonic() - begun)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"added {added} slowest {slowest:.3f}\n")


def compare(volume: Any, path: Path) -> str | None:
    """Say in what a volume differs from what nibabel or SimpleITK reads; None if in nothing."""
    try:
        voxels, affine = _read_otherwise(path)
    except Exception as fault:
        return f"only we read it: {type(fault).__name__}: {fault}".replace("\n", " ")[:300]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = voxels.astype(np.float32)
    if expected.shape != volume.shape:
        return f"shape {tuple(volume.shape)}, elsewhere {expected.shape}"
    if not np.array_equal(volume.numpy(), expected, equal_nan=True):
        return "other voxels"
    # Slices may lie a twentieth of their distance off; ITK places them by the first two.
    reach = 0.06 if path.is_dir() else 1e-6
    if not np.allclose(volume.affine.numpy(), affine, rtol=reach, atol=reach * np.abs(affine[:3, :3]).max()):
        return f"affine {volume.affine.tolist()}, elsewhere {affine.tolist()}"
    return None


def _read_otherwise(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(C, D, H, W)`` and the RAS+ affine in mm, by nibabel or SimpleITK alone."""
    if path.name.endswith((".nii", ".nii.gz")):
        image = nibabel.load(path)
        voxels = np.asanyarray(image.dataobj)
        voxels = voxels.reshape(*voxels.shape[:3], -1)
        unit = {1: 1e3, 3: 1e-3}.get(int(image.header["xyzt_units"]) & 7, 1.0)
        return np.moveaxis(voxels, -1, 0), np.diag([unit, unit, unit, 1]) @ image.affine
    import SimpleITK  # large, and not for NIfTI

    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    files = SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(path)) if path.is_dir() else str(path)
    image = SimpleITK.ReadImage(files)
    array = SimpleITK.GetArrayFromImage(image)
    if image.GetNumberOfComponentsPerPixel() > 1:
        array = np.moveaxis(array, -1, 0)
    array = array if array.ndim == 4 else array[None]
    size = image.GetDimension()
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(size, size)[:3, :3] * image.GetSpacing()[:3]
    affine[:3, 3] = image.GetOrigin()[:3]
    return array.transpose(0, 3, 2, 1), np.diag([-1.0, -1, 1, 1]) @ affine


if __name__ == "__main__":
    read_files(sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4]))
