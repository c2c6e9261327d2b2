"""Damaged archives ended in untyped errors or an endless loop. All members are checked before the first is written."""

import io
import tarfile
import zipfile

import pytest

from volseg.data.fetching import unpack
from volseg.errors import CheckpointError, DataError
from volseg.exchange.archive import is_archive, read_archive, write_archive


def member(name, content=b"x", **settings):
    info = tarfile.TarInfo(name)
    info.size = len(content or b"")
    for key, value in settings.items():
        setattr(info, key, value)
    return info, content


def pack(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def chain_of_long_names(count):
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4
    return (header.tobuf(tarfile.GNU_FORMAT) + b"abc".ljust(512, b"\0")) * count + bytes(1024)


GOOD = member("T/a.nii.gz")

TARS = {
    "a folder inside a file": (pack(GOOD, member("T/a.nii.gz/b")), "as a file and as a folder"),
    "a file, then its folder": (pack(GOOD, member("T/a.nii.gz", b"", type=tarfile.DIRTYPE)), "as a file and as a fold"),
    "a folder, then its file": (pack(member("T/a/b"), member("T/a")), "'T/a' as a file and as a folder"),
    "twice": (pack(GOOD, GOOD), "holds 'T/a.nii.gz' twice"),
    "twice by a dot": (pack(GOOD, member("T/./a.nii.gz")), "twice"),
    "upper case": (pack(GOOD, member("T/A.nii.gz")), "are one name on some disks"),
    "composed": (pack(member("T/\u00e9"), member("T/e\u0301")), "are one name on some disks"),
    "a long name": (pack(member("T/" + "n" * 300)), "a name of 302 bytes"),
    "a deep name": (pack(member("/".join("d" * 40))), "a name of 79 bytes"),
    "a negative size": (pack(member("T/a", pax_headers={"size": "-512"})), "is damaged"),
    "a huge size": (pack(member("T/a", pax_headers={"size": str(10**18)})), "unexpected end of data"),
    "a sparse file": (pack(member("T/a", pax_headers={"GNU.sparse.realsize": "1"})), "no plain file|is damaged"),
    "a sparse map": (pack(member("T/a", pax_headers={"GNU.sparse.map": "0,x"})), "no plain file|is damaged"),
    "a link": (pack(member("T/a", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "is no plain file"),
    "a hard link": (pack(member("T/a", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")), "is no plain file"),
    "a pipe": (pack(member("T/a", b"", type=tarfile.FIFOTYPE)), "is no plain file"),
    "a sparse file of GNU": (pack(member("T/a", b"", type=tarfile.GNUTYPE_SPARSE)), "no plain file|is damaged"),
    **{
        f"outside as {name}": (pack(member(name)), "which lies outside the archive")
        for name in ("../outside", "T/../../outside", "/outside", "C:\\outside", "T\\..\\..\\outside")
    },
    "a device": (pack(member("T/a", b"", type=tarfile.BLKTYPE)), "is no plain file"),
    "long names of long names": (chain_of_long_names(5000), "is damaged"),
    "cut": (pack(GOOD)[:600], "unexpected end of data"),
    "junk for a header": (pack(GOOD)[:1024] + b"\xff" * 512, "unexpected end of data"),
    "gzip": (b"\x1f\x8b\x08" + bytes(600), "no tar archive"),
    "empty": (b"", "no tar archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", TARS)
def test_a_refused_tar_archive_writes_nothing_outside(name, tmp_path):
    content, message = TARS[name]
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        unpack(tmp_path / "a.tar", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.tar", "new"}
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


def test_bytes_after_the_end_of_a_tar_archive_are_ignored(tmp_path):
    (tmp_path / "a.tar").write_bytes(pack(GOOD) + b"junk")
    unpack(tmp_path / "a.tar", tmp_path / "new")
    assert (tmp_path / "new" / "T" / "a.nii.gz").read_bytes() == b"x"


def test_a_damaged_byte_of_a_model_file_is_harmless_or_refused(tmp_path):
    written = {"0/config.yaml": b"name: a", "0/weights": bytes(50)}
    whole = write_archive(tmp_path / "model.zip", {}, written).read_bytes()
    for place in range(len(whole)):
        for bits in (0xFF, 0x80):
            damaged = bytearray(whole)
            damaged[place] ^= bits
            (tmp_path / "model.zip").write_bytes(damaged)
            is_archive(tmp_path / "model.zip")
            try:
                _, members = read_archive(tmp_path / "model.zip")
            except CheckpointError:
                continue
            assert members == written


def test_a_compressed_model_file_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", bytes(10**7))
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_archive(tmp_path / "model.zip")
