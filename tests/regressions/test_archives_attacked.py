"""An archive or a server could end a fetch by an untyped error, in an endless loop, or with a full disk.

Every member is looked at before the first is written; a file of unknown length is bounded by a limit and by the disk.
"""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest

from volseg.data import download as downloading
from volseg.data.download import Persistence, download
from volseg.data.unpacking import unpack
from volseg.errors import CheckpointError, DataError
from volseg.exchange.archive import is_archive, read_archive, write_archive

QUICK = Persistence(timeout=5.0, attempts=2, first_wait=0.001, longest_wait=1.0)


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
    "a device": (pack(member("T/a", b"", type=tarfile.BLKTYPE)), "is no plain file"),
    "long names of long names": (chain_of_long_names(5000), "is damaged"),
    "cut": (pack(GOOD)[:600], "unexpected end of data"),
    "junk for a header": (pack(GOOD)[:1024] + b"\xff" * 512, "unexpected end of data"),
    "gzip": (b"\x1f\x8b\x08" + bytes(600), "no tar archive"),
    "empty": (b"", "no tar archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", TARS)
def test_a_tar_archive_is_refused_and_writes_nothing_outside(name, tmp_path):
    content, message = TARS[name]
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        unpack(tmp_path / "a.tar", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.tar", "new"}
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


def test_zeros_and_junk_behind_the_end_are_no_fault(tmp_path):
    (tmp_path / "a.tar").write_bytes(pack(GOOD) + b"junk")
    unpack(tmp_path / "a.tar", tmp_path / "new")
    assert (tmp_path / "new" / "T" / "a.nii.gz").read_bytes() == b"x"


def test_a_damaged_model_file_is_refused_whatever_byte_it_is(tmp_path):
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


def test_a_model_file_that_grows_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", bytes(10**7))
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_archive(tmp_path / "model.zip")


@pytest.fixture
def serve(monkeypatch):
    """Return a function that starts a server which answers by ``act``, and returns its URL."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(act):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                act(self)

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/a.tar"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def fetch(url, path, content=b"x"):
    path.touch()
    with path.open("r+b", buffering=0) as part:
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        download(url, part, path, md5=md5, persistence=QUICK)


@pytest.mark.parametrize("bound", ["MOST_BYTES", "KEPT_FREE"])
def test_a_download_that_does_not_end_is_ended(serve, tmp_path, monkeypatch, bound):
    """The limits are made small, as the test should not fill the disk."""
    monkeypatch.setattr(downloading, "CHECKED_EVERY", 1 << 20)
    monkeypatch.setattr(downloading, bound, {"MOST_BYTES": 3 << 20, "KEPT_FREE": 1 << 60}[bound])

    def act(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:  # until the client has gone
            handler.wfile.write(bytes(1 << 16))

    with pytest.raises(DataError, match=r"does not tell its length, and after \d{7} bytes it has not ended"):
        fetch(serve(act), tmp_path / "a.part")
    assert (tmp_path / "a.part").stat().st_size == 0


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1",
        "http://[",
        "//[",
        "http://h:abc/",
        "http://127.0.0.1:99999/",
        "http://" + "a" * 70 + "/",
        "file:///etc/passwd",
        "ftp://h/x",
        "data:,x",
        "http://\u00ff..x/",
    ],
)
def test_a_redirect_to_no_address_is_refused(serve, tmp_path, address):
    def act(handler):
        handler.send_response(302)
        handler.send_header("Location", address)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with pytest.raises(DataError, match=r"cannot be fetched|server answers 302"):
        fetch(serve(act), tmp_path / "a.part")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "9" * 5000},
        {"Content-Length": "-5"},
        {"Content-Range": f"bytes 0-9/{'9' * 5000}"},
        {"Retry-After": "9" * 5000},
        {"Retry-After": "Mon, 01 Jan 0001 00:00:00 -0000"},
    ],
    ids=lambda headers: "-".join(headers),
)
def test_numbers_that_no_server_means(serve, tmp_path, headers):
    def act(handler):
        handler.send_response(503 if "Retry-After" in headers else 206 if "Content-Range" in headers else 200)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    with pytest.raises(DataError, match=r"cannot be fetched|another file|the server answers"):
        fetch(serve(act), tmp_path / "a.part")
