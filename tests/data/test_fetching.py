"""Fetching a task from a local HTTP server that interrupts, truncates and changes downloads."""

import hashlib
import http.client
import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from ready_python import wait_until
from typer.testing import CliRunner

from volseg.cli import app
from volseg.config import catalogue
from volseg.config.catalogue import PublicTask
from volseg.data import download as downloading
from volseg.data.download import download
from volseg.data.fetching import fetch_task
from volseg.errors import DataError
from volseg.monitoring import console

pytestmark = pytest.mark.usefixtures("ready_python")

ATTEMPTS = 3
CONTENT = bytes(range(256)) * 4096  # 1 MiB, in which no part is like its neighbour by chance

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each request by the next of its server's answers; the last one stays."""

    def do_GET(self):
        self.server.requests.append(dict(self.headers))
        answers = self.server.answers
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def log_message(self, *arguments):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content_Length": len(content), **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)


def whole(content=CONTENT, **headers):
    """Know no ranges."""
    return lambda handler: handler.answer(200, content, **headers)


def ranged(content=CONTENT, upto=None):
    """Know ranges; break the connection off at byte ``upto``."""

    def act(handler):
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start and start >= len(content):
            handler.answer(416, Content_Range=f"bytes */{len(content)}")
            return
        place = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        handler.answer(206 if start else 200, content[start:upto], Content_Length=len(content) - start, **place)

    return act


def refuse(status, **headers):
    return lambda handler: handler.answer(status, **headers)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(downloading, "ATTEMPTS", ATTEMPTS)
    monkeypatch.setattr(downloading, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(downloading, "TIMEOUT", 5.0)


@pytest.fixture
def serve(monkeypatch):
    """Return a function that starts a server with these answers and returns its URL and its requests."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = []

    def start(*answers: Answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # a client that does not want the rest
        server.answers, server.requests = list(answers), []
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}/file.tar", server.requests

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def fetch(tmp_path):
    """Return a function that downloads a URL into a part file and returns the file's content."""

    def get(url, content=CONTENT, *, before=None, **settings):
        path = tmp_path / "file.part"
        if before is not None:
            path.write_bytes(before)
        path.touch()
        with path.open("r+b") as part:
            md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
            download(url, part, path, md5=md5, **settings)
        return path.read_bytes()

    return get


def ranges(requests):
    return [request.get("Range") for request in requests]


def test_a_plain_download_is_told_byte_by_byte(serve, fetch):
    url, requests = serve(whole())
    told = []
    assert fetch(url, show=lambda *progress: told.append(progress)) == CONTENT
    assert ranges(requests) == [None]
    assert requests[0]["Accept-Encoding"] == "identity"
    fetched = [done for title, done, total in told if title == "fetching" and total == len(CONTENT)]
    assert fetched[0] == 0
    assert fetched == sorted(fetched)
    assert fetched[-1] == len(CONTENT)
    assert told[-1] == ("checking", len(CONTENT), len(CONTENT))


def test_attempts_that_bring_something_are_not_counted(serve, fetch):
    stops = range(100_000, len(CONTENT), 100_000)
    assert len(stops) > ATTEMPTS
    url, _ = serve(*(ranged(upto=stop) for stop in stops), ranged())
    assert fetch(url) == CONTENT


def test_another_process_goes_on(serve, fetch):
    url, requests = serve(ranged(upto=300_000), refuse(503), refuse(503), refuse(503), ranged())
    with pytest.raises(DataError, match=r"the last attempt failed: the server answered 503 .* 300000 bytes are kept"):
        fetch(url)
    assert fetch(url) == CONTENT
    assert ranges(requests)[-1] == "bytes=300000-"
    assert fetch(url) == CONTENT  # the server has nothing more
    assert ranges(requests)[-1] == f"bytes={len(CONTENT)}-"


NEWER = CONTENT[::-1]
ANEW = [None, "bytes=300000-", None]
BROKEN_OFF = {
    "twice": ([ranged(upto=300_000), ranged(upto=700_000), ranged()], [*ANEW[:2], "bytes=700000-"]),
    "no ranges": ([ranged(upto=300_000), whole()], ANEW[:2]),
    "another part": ([ranged(upto=300_000), refuse(206, Content_Range="bytes 1-9/1048576"), ranged()], ANEW),
}
"""Answers, and which ranges were requested."""


@pytest.mark.parametrize(("answers", "asked"), BROKEN_OFF.values(), ids=BROKEN_OFF)
def test_a_download_that_broke_off_is_gone_on_with_or_begun_anew(serve, fetch, answers, asked):
    url, requests = serve(*answers)
    assert fetch(url) == CONTENT
    assert ranges(requests) == asked


@pytest.mark.parametrize("newer", [NEWER, NEWER[:1000]], ids=["changed", "shorter now"])
def test_a_file_that_changed_between_two_parts_is_fetched_anew_by_the_next_attempt(serve, fetch, newer):
    url, requests = serve(ranged(upto=300_000), ranged(newer))
    with pytest.raises(DataError, match=r"changed between two attempts: its md5 is .*; try again"):
        fetch(url, newer)
    assert fetch(url, newer) == newer
    assert ranges(requests) == ANEW


def stalling(content, upto, released):
    """Return an act that sends the content before ``upto``, and nothing more until it is released."""

    def act(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:upto])
        handler.wfile.flush()
        released.wait(300)

    return act


def test_a_server_that_stalls_is_asked_again(serve, fetch, monkeypatch):
    monkeypatch.setattr(downloading, "TIMEOUT", 0.5)
    released = threading.Event()
    url, requests = serve(stalling(CONTENT, 200_000, released), ranged())
    try:
        assert fetch(url) == CONTENT
    finally:
        released.set()
    assert 0 < int(requests[1]["Range"].removeprefix("bytes=").rstrip("-")) <= 200_000


AT_ONCE = {
    "404": (refuse(404), r"the server answered 404 \(.*\); check the address, or name a mirror with --url"),
    "no length": (whole(Content_Length=None), "the server does not send the file's length; name a mirror with"),
    "other bytes": (whole(NEWER), r"is not the expected file, .*: its md5 is \w{32}, needed: \w{32}; try"),
}


@pytest.mark.parametrize(("answer", "message"), AT_ONCE.values(), ids=AT_ONCE)
def test_what_no_other_attempt_mends_is_refused_at_once_and_not_kept(serve, fetch, tmp_path, answer, message):
    url, requests = serve(answer)
    with pytest.raises(DataError, match=message):
        fetch(url)
    assert len(requests) == 1
    assert (tmp_path / "file.part").stat().st_size == 0
    with pytest.raises(DataError, match=message):
        fetch_task(public(CONTENT, url), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_redirects_are_followed_within_the_web(serve, fetch):
    url, requests = serve(whole())
    first, _ = serve(refuse(302, Location=url))
    assert fetch(first) == CONTENT
    assert len(requests) == 1
    circle, _ = serve(lambda handler: handler.answer(302, Location=handler.path))
    with pytest.raises(DataError, match=r"the server answered 302 .*infinite loop"):
        fetch(circle)


def test_an_encrypted_address_redirects_to_no_plain_one(serve, fetch, monkeypatch):
    def answer_unencrypted(handler, request):  # no certificate is needed here
        return handler.do_open(http.client.HTTPConnection, request)

    monkeypatch.setattr(urllib.request.HTTPSHandler, "https_open", answer_unencrypted)
    plain, _ = serve(whole())
    first, _ = serve(refuse(302, Location=plain))
    with pytest.raises(DataError, match=rf"redirects to {plain}, which is not encrypted"):
        fetch(first.replace("http:", "https:"))


ADDRESSES = ["http://[", "http://h:abc/", "http://127.0.0.1:99999/", "file:///etc/passwd", "data:,x", "http://ÿ..x/"]
LIES = {
    **{f"to {address}": refuse(302, Location=address) for address in ADDRESSES},
    "too long": whole(Content_Length=len(CONTENT) + 5000),
    "too short": whole(Content_Length=len(CONTENT) - 5000),
    "endless": refuse(200, Content_Length="9" * 5000),
    "negative": refuse(200, Content_Length="-5"),
    "range": refuse(206, Content_Range=f"bytes 0-9/{'9' * 5000}"),
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_wrong_addresses_and_lengths_in_headers_are_refused(serve, fetch, answer):
    """Python reads no number of 5,000 digits; some of these ended a fetch in a ValueError."""
    url, requests = serve(answer)
    with pytest.raises(
        DataError, match=r"cannot be fetched|server answered 302|is not the expected file|the connection ended"
    ):
        fetch(url)
    assert len(requests) <= ATTEMPTS + 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        *(
            (url, r"cannot be fetched; needed: https://")
            for url in ("file:///etc/passwd", "x.tar", "https://", "http://[")
        ),
        ("http://127.0.0.1/a b", r"cannot be fetched: .*control characters"),
        ("http://127.0.0.1:1/x", r"the last attempt failed: .*refused"),
    ],
)
def test_places_from_which_nothing_comes(fetch, monkeypatch, url, message):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataError, match=message):
        fetch(url)


def test_a_disk_without_room_is_said_before_the_first_byte(serve, fetch, tmp_path):
    url, _ = serve(whole(Content_Length=10**16))
    with pytest.raises(DataError, match=r"GiB free, but 18626451\.5 GiB are needed to fetch and unpack the archive"):
        fetch(url, spare=1.0)


def test_proxies_of_the_environment_are_used(serve, fetch, monkeypatch):
    proxy, requests = serve(whole())
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert fetch("http://nowhere.invalid/file.tar") == CONTENT
    assert requests[0]["Host"] == "nowhere.invalid"


# Archives


def make_archive(*members, root="Task77_Test", **changes):
    """Return a tar of a small task, with further files: their names and contents."""
    declared = {
        "name": "Test",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "organ"},
        "training": [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
        **changes,
    }
    files = {
        f"{root}/dataset.json": json.dumps(declared).encode(),
        f"._{root}": b"macOS",
        f"{root}/imagesTr/._a.nii.gz": b"macOS",
        f"{root}/imagesTr/a.nii.gz": b"image",
        f"./{root}/labelsTr/a.nii.gz": b"label",
        f"{root}/.DS_Store": b"macOS",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", encoding="utf-8") as archive:
        for name, content in (*files.items(), *members):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def public(content, url="https://nowhere.invalid/Task77_Test.tar"):
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    facts = {"licence": "CC0", "modalities": ("CT",), "labels": {0: "background", 1: "organ"}}
    return PublicTask(name="Task77_Test", url=url, md5=md5, num_training=1, num_test=0, manifest={}, **facts)


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_task_is_fetched_whole(serve, tmp_path):
    content = make_archive()
    url, requests = serve(ranged(content, upto=2000), ranged(content))
    told = []
    found = fetch_task(public(content, url), tmp_path / "new", show=lambda *p: told.append(p[0]))
    assert found == tmp_path / "new/Task77_Test"
    assert listed(tmp_path / "new") == [
        "Task77_Test/dataset.json",
        "Task77_Test/imagesTr/a.nii.gz",
        "Task77_Test/labelsTr/a.nii.gz",
    ]
    assert (found / "labelsTr/a.nii.gz").read_bytes() == b"label"
    assert list(dict.fromkeys(told)) == ["fetching", "checking", "unpacking"]
    assert fetch_task(public(content, url), tmp_path / "new") == found
    assert len(requests) == 2  # what is there is not asked for


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", r"is not a tar archive"),
        (make_archive(training=[]), r"lists no training cases"),
        (make_archive(training=[{"image": "imagesTr/b.nii", "label": "labelsTr/b.nii"}]), r"2 file.* do not exist"),
    ],
    ids=["text", "no cases", "absent files"],
)
def test_an_archive_that_holds_no_whole_task_leaves_no_folder(serve, tmp_path, content, message):
    url, _ = serve(whole(content))
    with pytest.raises(DataError, match=message):
        fetch_task(public(content, url), tmp_path / "new")
    assert listed(tmp_path) == ["new/Task77_Test.tar.part"]
    assert [path.name for path in (tmp_path / "new").iterdir() if path.is_dir()] == []


def test_an_archive_without_a_folder_becomes_one_beside_what_a_killed_process_left(serve, tmp_path):
    content = make_archive(root=".")
    (tmp_path / ".Task77_Test.partial").mkdir()
    (tmp_path / ".Task77_Test.partial/half").touch()
    url, _ = serve(whole(content))
    found = fetch_task(public(content), tmp_path, url=url)  # a mirror
    assert listed(found) == ["dataset.json", "imagesTr/a.nii.gz", "labelsTr/a.nii.gz"]


def test_a_folder_of_that_name_that_holds_something_else_stays(tmp_path):
    (tmp_path / "Task77_Test").mkdir()
    (tmp_path / "Task77_Test/mine.txt").touch()
    with pytest.raises(DataError, match=r"exists, but does not contain a complete task .*; move it away, or name"):
        fetch_task(public(b""), tmp_path)
    assert listed(tmp_path) == ["Task77_Test/mine.txt"]


FETCH = """
import json, sys
from volseg.config.catalogue import PublicTask
from volseg.data.fetching import fetch_task
facts = json.loads(sys.argv[1])
task = PublicTask(**{**facts, "modalities": ("CT",), "labels": {0: "background", 1: "organ"}, "manifest": {}})
fetch_task(task, sys.argv[2])
"""


@contextmanager
def fetching(task, folder):
    """Fetch in a process of its own."""
    facts = {name: getattr(task, name) for name in ("name", "url", "md5", "licence", "num_training", "num_test")}
    command = [sys.executable, "-c", FETCH, json.dumps(facts), str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_leaves_what_has_come_and_two_do_not_fetch_at_once(serve, tmp_path):
    content = make_archive(("Task77_Test/large", CONTENT))
    released = threading.Event()
    url, requests = serve(stalling(content, 400_000, released), ranged(content))
    task, part = public(content, url), tmp_path / "Task77_Test.tar.part"
    try:
        with fetching(task, tmp_path) as process:
            wait_until(lambda: part.exists() and part.stat().st_size > 100_000, 120)
            with pytest.raises(DataError, match=r"Task77_Test\.tar\.part is being fetched by another process; wait"):
                fetch_task(task, tmp_path)
            process.send_signal(signal.SIGINT)
            assert process.wait() != 0
    finally:
        released.set()
    held = part.stat().st_size
    assert held > 100_000
    assert listed(tmp_path) == ["Task77_Test.tar.part"]
    assert fetch_task(task, tmp_path).is_dir()
    assert requests[-1]["Range"] == f"bytes={held}-"
    assert not part.exists()


def test_the_verb_fetches_what_a_manifest_says(serve, tmp_path, monkeypatch):
    """With a manifest of this server's archive among the public ones, and bars on a terminal."""
    content = make_archive()
    url, _ = serve(ranged(content, upto=3000), ranged(content))
    manifest = yaml.safe_load((catalogue._find_manifests() / "Task04_Hippocampus.yaml").read_text(encoding="utf-8"))
    manifest |= {"name": "Task77_Test", "url": url, "md5": hashlib.md5(content, usedforsecurity=False).hexdigest()}
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/Task77_Test.yaml").write_text(yaml.safe_dump(manifest), encoding="utf-8")
    monkeypatch.setattr(catalogue, "_find_manifests", lambda: tmp_path / "manifests")
    monkeypatch.setattr(console, "shows_bars", lambda: True)
    result = CliRunner().invoke(app, ["data", "fetch", "77", "-o", str(tmp_path)], catch_exceptions=False)
    assert result.stdout.split() == [str(tmp_path / "Task77_Test")]
    size = f"{len(content) / 2**20:.1f}"
    for title in ("fetching", "checking"):
        assert re.search(rf"{title} .* {size}/{size} MiB", result.stderr), title
    assert re.search(r"unpacking .* MiB", result.stderr)
