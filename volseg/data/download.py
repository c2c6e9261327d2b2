"""Fetch a large file over HTTP, resume an earlier attempt, and accept the file only if its checksum is right.

urllib sends the requests: it follows the environment's proxies and checks certificates. This module adds the rest. It
requests the missing bytes by ``Range``, on the condition (``If-Range``) that the server still has the same file. It
repeats the request if a server ignores ranges, changes the file, ends early, stalls, or is busy. pooch and MONAI's
``download_url`` start over each time.
"""

import email.utils
import errno
import hashlib
import http.client
import json
import logging
import os
import random
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import urlsplit

from volseg.data.json_files import read_json
from volseg.errors import DataError, VolsegError
from volseg.files import replacing
from volseg.version import __version__

logger = logging.getLogger(__name__)

ShowBytes = Callable[[str, int, int | None], object]
"""Called with the current step, its number of bytes so far, and the total if it is known."""

PIECE = 1 << 16
"""Bytes of one read; a broken connection loses fewer."""

MOST_BYTES = 64 << 30
"""Bytes of a file whose length the server does not give; the largest archive that volseg knows has 27 GB."""

KEPT_FREE = 1 << 30
"""Bytes of the disk that a file of unknown length leaves free."""

CHECKED_EVERY = 1 << 26
"""Bytes of a file of unknown length between two checks of these limits."""

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a server may answer the same request later."""

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Persistence:
    """How long to wait for an answer, and how often to ask again."""

    timeout: float = 60.0
    """Seconds without a byte."""
    attempts: int = 8
    """Attempts in a row without a new byte."""
    first_wait: float = 1.0
    """Seconds before the second attempt; twice as long before each further one."""
    longest_wait: float = 300.0
    """Seconds before an attempt at most; if the server asks for more, the download ends."""


PATIENT = Persistence()
"""Defaults for a file that is fetched once."""


class _Passing(Exception):  # noqa: N818  (no error: another attempt may bring more)
    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def download(
    url: str,
    part: BinaryIO,
    path: Path,
    *,
    md5: str,
    spare: float = 0.0,
    persistence: Persistence = PATIENT,
    show: ShowBytes | None = None,
) -> None:
    """Fetch ``url`` into an open file, after the bytes that the file has.

    Parameters
    ----------
    url : str
        ``https`` or ``http``.
    part : binary file
        Open for reading and writing. Its bytes stay for another attempt, unless the server has another file.
    path : Path
        Path of ``part``; the description of the download is kept beside it, in ``PATH.json``.
    md5 : str
        Checksum of the whole file.
    spare : float
        Free disk space that is needed to unpack the file, as a multiple of its size.
    persistence : Persistence
        How often to ask a server that fails.
    show : callable, optional
        Called with the progress.

    Raises
    ------
    DataError
        If the server does not answer, has no such file, or sends another one, or if the disk has no room.
    """
    require_web(url)
    attempt = _Download(url, part, path, spare, persistence, show or (lambda *_: None))
    attempt.run()
    if (found := attempt.digest()) != md5 and attempt.may_be_mixed:
        logger.warning("%s: the file was fetched in parts and has another checksum; it is fetched again", url)
        attempt.forget()
        attempt.run()
        found = attempt.digest()
    if found == md5:
        return
    attempt.forget()
    raise DataError(
        f"{url} is another file than the one wanted: its md5 is {found}, needed {md5}; name another mirror by --url"
    )


def require_web(url: str) -> None:
    """Raise unless a URL is one of the web: files on this machine need no fetching."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("https", "http") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise DataError(f"{url} cannot be fetched; needed: https://... (an archive on a disk is unpacked by tar xf)")


def require_room(folder: Path, needed: int, verb: str) -> None:
    """Raise unless a folder's disk has ``needed`` bytes free, to ``verb`` an archive."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{folder} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are needed to {verb} the archive; "
            "free space, or name another folder by --output"
        )


class _Download:
    def __init__(
        self, url: str, part: BinaryIO, path: Path, spare: float, persistence: Persistence, show: ShowBytes
    ) -> None:
        self._url = url
        self._part = part
        self._path = path
        self._described = path.with_name(f"{path.name}.json")
        self._spare = spare
        self._persistence = persistence
        self._show = show
        self._num_parts = 0
        self._num_changes = 0
        self._opener = urllib.request.build_opener(_SafeRedirects())
        self._total: int | None
        self._validator: str | None
        """The file's ETag, or the date of its last change, for ``If-Range``."""
        self._total, self._validator = self._recall()
        if (self._total, self._validator) == (None, None):  # the source of the bytes is unknown
            self.forget()

    def _recall(self) -> tuple[int | None, str | None]:
        """Return the length of the file and its validator; none if the description is absent, or about another URL."""
        try:
            known = read_json(self._described)
            url, total, validator = (known[key] for key in ("url", "total", "validator"))
        except (DataError, KeyError, TypeError):
            return None, None
        is_sound = url == self._url and isinstance(total, int | None) and isinstance(validator, str | None)
        return (total, validator) if is_sound else (None, None)

    @property
    def may_be_mixed(self) -> bool:
        """Whether the bytes may be of two files, or end early: servers may leave out the headers that tell."""
        return self._num_parts != 1 or self._total is None

    @property
    def _held(self) -> int:
        return self._part.seek(0, os.SEEK_END)

    @property
    def _is_whole(self) -> bool:
        return self._held == self._total

    def forget(self) -> None:
        """Drop the bytes and their description."""
        self._part.truncate(0)
        self._total = self._validator = None
        self._described.unlink(missing_ok=True)

    def _start_again(self) -> NoReturn:
        self.forget()
        self._num_changes += 1
        raise _Passing("the file has changed on the server")

    def run(self) -> None:
        """Ask until the file is complete."""
        failed = 0
        while not self._is_whole:
            before = self._held
            try:
                self._attempt()
                return
            except _Passing as reason:
                failed = 0 if self._held > before else failed + 1
                if max(failed, self._num_changes) >= self._persistence.attempts:
                    raise DataError(
                        f"{self._url} cannot be fetched, the last attempt failed as {reason}; {self._held} bytes are "
                        "kept: go on by the same command, or name a mirror by --url"
                    ) from reason
                self._wait(failed, reason)

    def _attempt(self) -> None:
        """Ask once, and write the answer.

        Raises
        ------
        _Passing
            If the file is not complete, or the server may answer later.
        """
        with _hearing(self._url):
            try:
                response = self._opener.open(self._request(), timeout=self._persistence.timeout)
            except urllib.error.HTTPError as refusal:
                with refusal:  # is a response too
                    self._take_refusal(refusal)
        with response:
            self._begin(response)
            self._receive(response)
        if self._total is not None and self._held < self._total:
            raise _Passing(f"the connection ended after {self._held} of {self._total} bytes")

    def _request(self) -> urllib.request.Request:
        headers = {"User-Agent": f"volseg/{__version__}", "Accept-Encoding": "identity"}
        if self._held:
            headers["Range"] = f"bytes={self._held}-"
            if self._validator is not None:
                headers["If-Range"] = self._validator
        return urllib.request.Request(self._url, headers=headers)  # noqa: S310 (see require_web)

    def _begin(self, response: Any) -> None:
        """Compare an answer with the bytes so far, and store its description of the file."""
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise DataError(f"{self._url} is sent as {encoding}, which was not requested; name a mirror by --url")
        start, total = 0, _as_number(response.headers.get("Content-Length"))
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            start, total = _read_range(response.headers.get("Content-Range", ""))
        elif self._held:
            logger.info("%s: the server sends the file from its beginning", self._url)
        changed = start and self._total not in (None, total)
        if start not in (0, self._held) or changed:
            self._start_again()
        self._num_parts = self._num_parts + 1 if start else 1
        self._part.truncate(start)
        etag = response.headers.get("ETag") or "W/"  # a weak ETag does not promise the same bytes
        self._total = total
        self._validator = response.headers.get("Last-Modified") if etag.startswith("W/") else etag
        if total is not None:
            require_room(self._path.parent, total - start + int(self._spare * total), "fetch and unpack")
        about = {"url": self._url, "total": total, "validator": self._validator}
        with replacing(self._described) as partial:
            partial.write_text(json.dumps(about) + "\n", encoding="utf-8")

    def _receive(self, response: Any) -> None:
        done = self._held
        try:
            while True:
                self._show("fetching", done, self._total)
                with _hearing(self._url):
                    piece = response.read(PIECE)
                if not piece:
                    return
                if self._part.write(piece) < len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += len(piece)
                if self._total is None and done % CHECKED_EVERY < PIECE:
                    self._require_end(done)
        except OSError as fault:
            raise DataError(
                f"{self._path} cannot be written: {fault.strerror}; free space, or name another folder by --output"
            ) from fault
        finally:
            with suppress(OSError):
                self._part.flush()

    def _require_end(self, done: int) -> None:
        """Raise if a file of unknown length is larger than every known archive, or would fill the disk."""
        free = shutil.disk_usage(self._path.parent).free
        if done > MOST_BYTES or free < KEPT_FREE:
            self.forget()
            raise DataError(
                f"{self._url} does not give its length, and has not ended after {done} bytes, with {free} bytes of the "
                f"disk free; needed: at most {MOST_BYTES} bytes, and {KEPT_FREE} free. Name a mirror by --url"
            )

    def _take_refusal(self, refusal: urllib.error.HTTPError) -> NoReturn:
        """Raise `_Passing` if the server may answer later, else `DataError`."""
        if refusal.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._held:
            self._start_again()  # a complete file is not asked for
        told = f"{self._url}: the server answers {refusal.code} ({refusal.reason})"
        if refusal.code not in PASSING:
            raise DataError(f"{told}; check the address, or name a mirror by --url")
        wait = _read_wait(refusal.headers.get("Retry-After"))
        if wait is not None and wait > self._persistence.longest_wait:
            raise DataError(f"{told}, and asks to wait {wait:.0f} s; run the same command then: the bytes so far stay")
        raise _Passing(f"the server answers {refusal.code} ({refusal.reason})", wait)

    def _wait(self, failed: int, reason: _Passing) -> None:
        own = self._persistence.first_wait * 2 ** max(failed - 1, 0)
        # Random, so that clients that failed together do not return together.
        wait = min(own * random.uniform(0.5, 1.0), self._persistence.longest_wait)  # noqa: S311 (no secret)
        wait = max(wait, reason.wait or 0.0)
        logger.info("%s: %s; going on in %.0f s", self._url, reason, wait)
        time.sleep(wait)

    def digest(self) -> str:
        """Return the md5 of the bytes so far."""
        hashed, total = hashlib.md5(usedforsecurity=False), self._held
        self._part.seek(0)
        while piece := self._part.read(1 << 20):
            hashed.update(piece)
            self._show("checking", self._part.tell(), total)
        return hashed.hexdigest()


@contextmanager
def _hearing(url: str) -> Iterator[None]:
    """Turn errors of the network into `_Passing`. Errors of the disk must not occur inside."""
    try:
        yield
    except VolsegError:
        raise
    except (http.client.InvalidURL, ValueError, OverflowError) as fault:
        raise DataError(f"{url} cannot be fetched: {fault}, in this URL or in one that it redirects to") from fault
    except (OSError, http.client.HTTPException) as fault:  # timeouts and urllib's own errors are OSErrors
        reason = getattr(fault, "reason", fault)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DataError(f"{url}: the server's certificate is not trusted: {reason.verify_message}") from fault
        raise _Passing(str(reason) or type(reason).__name__) from fault


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to web addresses, but not from an encrypted one to an open one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request."""
        require_web(newurl)
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url} leads to {newurl}, which is not encrypted; name another mirror by --url")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _as_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def _read_range(text: str) -> tuple[int, int | None]:
    """Return the first byte of a part, -1 if the header is wrong, and the length of the file."""
    match = CONTENT_RANGE.fullmatch(text.strip())
    start = match and _as_number(match[1])
    return (-1, None) if match is None or start is None else (start, _as_number(match[2]))


def _read_wait(text: str | None) -> float | None:
    """Return the seconds of ``Retry-After``, which are a number or a date; None if it is neither."""
    if (seconds := _as_number(text and text.strip())) is not None:
        return float(seconds)
    try:
        return max(email.utils.parsedate_to_datetime(text or "").timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
