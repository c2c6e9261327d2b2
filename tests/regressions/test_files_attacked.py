"""Files that ended the process, exhausted its memory, or hid all other cases behind a traceback.

A 48 KiB file that claimed 1500 voxels a side took 3.2 GiB; a line of 4000 digits in a NRRD header ended ITK by SIGSEGV;
a gzip bomb of 4 MiB became 8.2 GiB; a named pipe was waited for without end; one unreadable file hid all other bad.
"""

import gzip
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from volseg.data import load_task, make_task
from volseg.data.checks import reading
from volseg.data.checks.reading import check_cases
from volseg.data.readers import read_volume
from volseg.errors import DamagedFileError, ReaderError

VOXELS = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
SMALL = 100 << 20
"""Bytes that refusing a file may cost."""


def grown(call):
    """Return how much memory the process peaked higher in ``call``."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def refused(path, match):
    def read():
        with pytest.raises(ReaderError, match=match):
            read_volume(path)

    assert grown(read) < SMALL


def nifti(path, shape=(3, 4, 5), dtype=np.int16, kind=nibabel.Nifti1Image, **fields):
    """Write a header with any claims, followed by the 120 bytes of `VOXELS`."""
    image = kind(VOXELS.astype(dtype), np.eye(4))
    content = bytearray(image.to_bytes())
    header = kind.header_class(bytes(content[: kind.header_class.sizeof_hdr]), check=False)
    header["dim"][1 : 1 + len(shape)] = shape
    header["dim"][0] = len(shape)
    for name, value in fields.items():
        header[name] = value
    content[: kind.header_class.sizeof_hdr] = header.binaryblock
    path.write_bytes(gzip.compress(bytes(content)) if path.suffix == ".gz" else bytes(content))
    return path


CUT = r"is truncated or damaged \(Expected \d+ bytes, got|GiB of memory, but"
LARGEST = (32767, 32767, 32767)


@pytest.mark.parametrize(
    ("name", "shape", "match", "fields"),
    [
        *((name, side, CUT, {}) for name in ("x.nii", "x.nii.gz") for side in ((1500, 1500, 1500), LARGEST)),
        ("x.nii", (2**40,) * 3, "GiB of memory, but|is truncated or damaged", {"kind": nibabel.Nifti2Image}),
        *(("x.nii.gz", sides, "has the shape|holds more|damaged", {}) for sides in ((-3, 4, 5), (0, 4, 5), (3, 4, -5))),
        # Voxels that are not numbers, before an array is made.
        *(
            ("x.nii", LARGEST, "stores voxels of type|is truncated or damaged", {"datatype": code})
            for code in (32, 128, 1536, 1792, 2048, 2304, 4096)
        ),
    ],
    ids=str,
)
def test_a_claim_that_the_file_cannot_hold(tmp_path, name, shape, match, fields):
    refused(nifti(tmp_path / name, shape, **fields), match)


def test_a_bomb_is_unpacked_no_further_than_its_header_needs(tmp_path):
    plain = nifti(tmp_path / "x.nii").read_bytes()
    bomb = tmp_path / "x.nii.gz"
    with gzip.open(bomb, "wb") as packed:
        packed.write(plain)
        for _ in range(400):
            packed.write(bytes(1 << 20))
    assert bomb.stat().st_size < 1 << 20
    refused(bomb, "contains more than its header says")


def test_members_and_padding_of_gzip_are_read_as_one(tmp_path):
    plain = nifti(tmp_path / "x.nii").read_bytes()
    path = tmp_path / "x.nii.gz"
    path.write_bytes(gzip.compress(plain[:200]) + bytes(5) + gzip.compress(plain[200:]) + bytes(700_000))
    np.testing.assert_array_equal(read_volume(path).numpy()[0], VOXELS)
    path.write_bytes(gzip.compress(plain) + b"garbage")
    refused(path, "is truncated or damaged")


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def link_to_zeros(path):
    path.symlink_to("/dev/zero")


def link_to_nothing(path):
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *(("x.nii", make) for make in (make_pipe, make_socket, link_to_zeros, link_to_nothing)),
        *((name, make_pipe) for name in ("x.nii.gz", "x.nrrd", "x.mha", "series")),
    ],
)
def test_what_is_no_regular_file_is_not_opened(tmp_path, name, make):
    path = tmp_path / name
    if name == "series":
        path.mkdir()
        make(path / "1.dcm")
    else:
        make(path)
    refused(path, "is neither a regular file nor a link|does not exist|cannot be accessed")


NRRD = {
    "type": "short",
    "dimension": "3",
    "space": "left-posterior-superior",
    "sizes": "3 4 5",
    "space directions": "(1,0,0) (0,1,0) (0,0,1)",
    "encoding": "raw",
    "endian": "little",
    "space origin": "(0,0,0)",
}
RAW = VOXELS.tobytes()
META = {"ObjectType": "Image", "NDims": "3", "BinaryData": "True", "DimSize": "3 4 5", "ElementType": "MET_SHORT"}


def header(path, fields, data=RAW):
    if path.suffix in (".nrrd", ".nhdr"):
        text = "NRRD0004\n" + "".join(f"{key}: {value}\n" for key, value in fields.items()) + "\n"
    else:
        text = "".join(f"{key} = {value}\n" for key, value in ({**fields, "ElementDataFile": "LOCAL"} | fields).items())
    path.write_bytes(text.encode("latin-1") + data)
    return path


@pytest.mark.parametrize("field", [*NRRD, "data file", "units", "line skip", "byte skip", "nonsense"])
def test_lines_that_ended_itk_do_not_reach_it(tmp_path, field):
    """In this process: a header that reached ITK would end it."""
    pytest.importorskip("SimpleITK")
    for text in ("9" * 4000, "a" * 4000, "%s%n" * 200):
        refused(header(tmp_path / "x.nrrd", {**NRRD, field: text}), "is truncated or damaged")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sizes": "1800 1800 1800"}, r"Expected \d+ bytes, got 120"),
        ({"sizes": "99999999999999999999 4 5"}, "sizes are"),
        ({"sizes": "-3 4 5"}, "sizes are"),
        ({"sizes": "3 4"}, "needed: 3 positive numbers"),
        ({"dimension": "6"}, "needed: 1 to 5"),
        ({"type": "block", "block size": "4000000000"}, "not an NRRD field|stores voxels of type 'block'"),
        ({"encoding": "bzip2"}, "convert it to raw or gzip"),
        ({"data file": "x%03d.raw 1 9999 1"}, "spreads its voxels over several files"),
        ({"data file": "LIST"}, "spreads its voxels over several files"),
        ({"data file": "nowhere.raw"}, "nowhere.raw cannot be accessed"),
        ({"encoding": "gzip"}, "is truncated or damaged"),
        ({"Sizes": "9 9 9"}, "the field sizes twice"),
        ({"DimSize": "1800 1800 1800"}, r"Expected \d+ bytes, got 120"),
        ({"DimSize": "3 4 0"}, "DimSize are"),
        ({"NDims": "9" * 400}, "its NDims contains a number of 400 characters"),
        ({"Offset": "9" * 4000}, "a line of 4009 characters"),
        ({"ElementNumberOfChannels": "-1"}, "ElementNumberOfChannels is"),
        ({"ElementNumberOfChannels": "100000"}, r"Expected \d+ bytes, got 120"),
        ({"ElementType": "MET_LONG"}, "which may mean 4 or 8 bytes; convert it"),  # eight were read as four and zeros
        ({"ElementType": "MET_NONE"}, "SimpleITK cannot read it"),
        ({"CompressedData": "True", "CompressedDataSize": "99999999999"}, r"Expected 99999999999 bytes"),
        ({"CompressedData": "True"}, "is truncated or damaged"),
        ({"ElementDataFile": "x%s%n.raw 1 9 1"}, "spreads its voxels over several files"),
        ({"BinaryData": "False"}, "convert it to binary"),
    ],
)
def test_claims_of_nrrd_and_metaimage(tmp_path, changes, match):
    is_meta = not {"Sizes", *NRRD, "data file"} & changes.keys()
    refused(header(tmp_path / ("x.mha" if is_meta else "x.nrrd"), {**(META if is_meta else NRRD), **changes}), match)


def test_a_packed_claim_is_counted_before_itk_allocates_it(tmp_path):
    noise = np.random.default_rng(0).bytes(1 << 20)  # such a file might well unpack to a gigabyte
    data = gzip.compress(bytes(200 << 20) + noise, compresslevel=1)
    fields = {**NRRD, "encoding": "gzip", "sizes": "512 512 512"}  # 256 MiB of short, 201 are there
    refused(header(tmp_path / "x.nrrd", fields, data), r"Expected 268435456 bytes, got 210763776")
    refused(header(tmp_path / "y.nrrd", {**fields, "sizes": "3 4 5"}, data), "contains more than its header says")


@pytest.mark.parametrize("size", [None, 0, -20])
@pytest.mark.parametrize("suffix", [".mha", ".mhd"])
def test_packed_voxels_of_a_wrong_size_are_no_memory_of_itks(tmp_path, suffix, size):
    """With a wrong CompressedDataSize ITK returned its memory, with a line on stderr but no error."""
    sitk = pytest.importorskip("SimpleITK")
    path = tmp_path / f"x{suffix}"
    sitk.WriteImage(sitk.GetImageFromArray(VOXELS.T), str(path), useCompression=True)
    np.testing.assert_array_equal(read_volume(path).numpy()[0], VOXELS)
    field = re.search(rb"CompressedDataSize = (\d+)\n", path.read_bytes())
    held = int(field[1])
    claimed = b"" if size is None else b"CompressedDataSize = %d\n" % (held + size if size else 0)
    path.write_bytes(path.read_bytes().replace(field[0], claimed))
    if suffix == ".mhd" and not size:  # of a file of its own ITK takes all bytes
        np.testing.assert_array_equal(read_volume(path).numpy()[0], VOXELS)
        return
    with pytest.raises(DamagedFileError, match=r"no CompressedDataSize|ended before the end-of-stream"):
        read_volume(path)


def test_fields_of_ones_own_are_read(tmp_path):
    """MetaImage files of ITK hold whatever was in its dictionary, NRRD's key/value pairs whatever anybody wants."""
    pytest.importorskip("SimpleITK")
    path = header(tmp_path / "x.mha", {**META, "ITK_InputFilterName": "GDCMImageIO", "0008|0060": "MR"})
    np.testing.assert_array_equal(read_volume(path).numpy()[0], VOXELS.reshape(5, 4, 3).T)
    path = header(tmp_path / "x.nrrd", {**NRRD, "DWMRI_b-value:=": "=" + "1" * 9000})
    np.testing.assert_array_equal(read_volume(path).numpy()[0], VOXELS.reshape(5, 4, 3).T)


def test_every_exception_of_a_reader_is_one_named_case(tmp_path, monkeypatch):
    """Whatever a parser raises: one file's MemoryError hid all other bad files."""
    task = load_task(make_task(tmp_path / "Task00_Made", num_cases=6, num_test=0))
    faults = [MemoryError(), RuntimeError("GDCM"), RecursionError("deep"), ValueError("odd"), OverflowError("large")]
    bad = {str(case["image"]): fault for case, fault in zip(task.training, faults, strict=False)}
    from volseg.data import readers

    read = readers.SUFFIXES[".nii.gz"]

    def raising(path):
        if str(path) in bad:
            raise bad[str(path)]
        return read(path)

    monkeypatch.setitem(readers.SUFFIXES._components, ".nii.gz", raising)
    problems = check_cases(task.training, task)
    assert [problem.case for problem in problems] == [case["case"] for case in task.training[:5]]
    assert all(str(problem.file) in problem.message for problem in problems)
    assert "needs more memory" in problems[0].message
    assert "RuntimeError: GDCM" in problems[1].message
    assert [problem.kind for problem in problems] == ["no-memory", *["unreadable"] * 4]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_no_bad_case(tmp_path, monkeypatch, stop):
    from volseg.data import readers

    def raising(path):
        raise stop

    monkeypatch.setitem(readers.SUFFIXES._components, ".nii", raising)
    with pytest.raises(stop):
        read_volume(nifti(tmp_path / "x.nii"))


def test_what_fails_in_a_check_is_one_named_case_too(tmp_path, monkeypatch):
    task = load_task(make_task(tmp_path / "Task00_Made", num_cases=2, num_test=0))

    def failing(image, task):
        raise MemoryError

    monkeypatch.setattr(reading, "check_image_voxels", failing)
    problems = check_cases(task.training, task)
    assert [problem.case for problem in problems] == [case["case"] for case in task.training]
    assert "needs more memory" in problems[0].message


SCRIPT = Path(__file__).parents[1] / "mutated_files.py"
KINDS = ["nii", "nii.gz", "nrrd", "nhdr", "mha", "mhd", "dicom"]


def attack(kind, first, last, folder):
    """Read so many damaged files in a process of limited memory; return the result of each."""
    if not kind.startswith("nii"):
        pytest.importorskip("SimpleITK")
    command = [sys.executable, str(SCRIPT), kind, str(first), str(last), str(folder)]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    said = [line for line in ended.stdout.splitlines() if line[:1].isdigit()]
    assert ended.returncode == 0, f"seed {said[-1:]}: status {ended.returncode}\n{ended.stderr[-2000:]}"
    assert len(said) == last - first
    assert not [line for line in said if "RAISED" in line or "DIFFERS" in line]
    return said


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_headers_are_read_or_refused(kind, tmp_path):
    said = attack(kind, 0, 150, tmp_path)
    assert sum("refused" in line for line in said) > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_damaged_headers_are_read_or_refused(kind, tmp_path):
    attack(kind, 150, 5000, tmp_path)
