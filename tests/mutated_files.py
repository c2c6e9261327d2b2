"""Damage the headers of images in seeded ways, and read each in a process of its own.

``python -m mutated_files KIND FIRST LAST FOLDER`` reads so many files of a kind and says what became of each.
"""

import random
import re
import resource
import sys
from pathlib import Path

import nibabel
import numpy as np

VOXELS = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1)
TEXTS = (
    "-1",
    "0",
    "99999",
    "2147483648",
    "9" * 30,
    "9" * 4000,
    "nan",
    "inf",
    "1e400",
    "(1,2",
    "%s%n",
    "",
    "\0",
    "a:b=c",
)
ADDED_BYTES = 400 << 20
"""What reading may add to the process: ITK and torch's threads take some; no file here holds a kilobyte."""


def sound_file(kind: str, folder: Path) -> Path:
    """Write a small image of a kind; return the file whose header is to be damaged."""
    path = folder / {"dicom": "series/1.dcm"}.get(kind, f"sound.{kind}")
    if kind.startswith("nii"):
        nibabel.save(nibabel.Nifti1Image(VOXELS, np.eye(4)), path)
        return path
    import SimpleITK  # large, and not for NIfTI

    image = SimpleITK.GetImageFromArray(VOXELS.T)
    if kind != "dicom":
        SimpleITK.WriteImage(image, str(path), useCompression=kind in ("nrrd", "mha"))
        return path
    path.parent.mkdir(exist_ok=True)
    writer = SimpleITK.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for index in range(3):
        piece = image[:, :, index : index + 1]
        for tag, value in (("0008|0060", "MR"), ("0020|000e", "1.2.3"), ("0008|0018", f"1.2.3.{index}")):
            piece.SetMetaData(tag, value)
        writer.SetFileName(str(path.parent / f"{index}.dcm"))
        writer.Execute(piece)
    return path


def mutate(content: bytes, kind: str, seed: int) -> bytes:
    """Return the content with one to three faults in its header, or in what is packed behind it."""
    draw = random.Random(seed)
    header = {"nii": 352, "nii.gz": len(content), "dicom": len(content)}.get(kind) or content.find(b"\n\n") + 2
    if kind in ("mha", "mhd"):
        header = content.find(b"\n", content.find(b"ElementDataFile")) + 1
    if kind in ("nhdr", "mhd"):
        header = len(content)
    for _ in range(draw.randint(1, 3)):
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


def main() -> None:
    """Read the mutated files, and say of each what came: a volume, a refusal, or another exception."""
    kind, first, last, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    from volseg.data.readers import read_volume
    from volseg.errors import ReaderError

    path = sound_file(kind, folder)
    read = path.parent if kind == "dicom" else path
    assert read_volume(read).numel() in (VOXELS.size, 5 * 4 * 3)
    content = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, last):
        path.write_bytes(mutate(content, kind, seed))
        sys.stdout.write(f"{seed} ")
        sys.stdout.flush()  # the process may end in what follows
        try:
            read_volume(read)
        except ReaderError as fault:
            became = f"refused: {fault}".replace("\n", " ")
        except BaseException as fault:
            became = f"RAISED {fault!r}"
        else:
            became = "read"
        sys.stdout.write(f"{became}\n")
        added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert added < ADDED_BYTES, f"{added} bytes more in the process after seed {seed}"


if __name__ == "__main__":
    main()
