"""Fetch a large file over HTTP, from where an earlier attempt ended, and believe its checksum only.

urllib does the requests: it follows the environment's proxies and checks certificates. What it lacks is here: the rest
of a file is asked for by ``Range``, under the condition (``If-Range``) that the file is still the one that was begun;
servers that know no ranges, change the file, end early, stall, or are busy are asked again; what they send is the
file once its checksum says so. pooch and MONAI's ``download_url`` begin anew each time.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import urlsplit

from volseg.data.json_files import read_json
from volseg.errors import DataError, VolsegError
from volseg.files import replacing
from volseg.version import __version__

__all__ = ["PATIENT", "Persistence", "ShowBytes", "download", "require_web"]

logger = logging.getLogger(__name__)

ShowBytes = Callable[[str, int, int | None], object]
"""Is told what is being done, how many bytes of it are, and of how many where that is known."""

PIECE = 1 << 16
"""Bytes that are read at a time: what can be lost where a connection breaks."""

MOST_BYTES = 64 << 30
"""Of a file whose length the server does not tell; the largest archive that volseg knows has 27 GB."""

KEPT_FREE = 1 << 30
"""Bytes of the disk that a file of unknown length leaves free."""

CHECKED_EVERY = 1 << 26

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a server may well answer the same request."""

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Persistence:
    """How long an answer is waited for, and how often a server is asked again."""

    timeout: float = 60.0
    """Seconds without a byte."""
    attempts: int = 8
    """In a row that bring nothing; the count begins anew with every byte that comes."""
    first_wait: float = 1.0
    """Seconds before the second attempt; twice as long before each further one."""
    longest_wait: float = 300.0
    """Seconds at most, also where the server asks for more: that is told to the user."""


PATIENT = Persistence()
"""As one waits for what is fetched once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """What is known of the file whose first bytes there are."""

    url: str
    total: int | None = None
    validator: str | None = None
    """Its ETag, or the date of its last change: what a server compares."""

    @classmethod
    def read(cls, path: Path, url: str) -> "_Begun":
        """Return what was written down; nothing if that is absent, damaged, or about another URL."""
        try:
            known = read_json(path)
            begun = cls(url=known["url"], total=known["total"], validator=known["validator"])
        except (DataError, KeyError, TypeError):
            return cls(url=url)
        sound = isinstance(begun.total, int | None) and isinstance(begun.validator, str | None)
        return begun if sound and begun.url == url else cls(url=url)

    def write(self, path: Path) -> None:
        described = {"url": self.url, "total": self.total, "validator": self.validator}
        with replacing(path) as partial:
            partial.write_text(json.dumps(described) + "\n", encoding="utf-8")


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
    """Bring what ``url`` holds into an open file, going on from the bytes that it has.

    Parameters
    ----------
    url : str
        ``https`` or ``http``.
    part : binary file
        Open for reading and writing. Whatever ends this function, its bytes stay, for another attempt.
    path : Path
        Of ``part``; what is known of the download is kept beside it, in ``PATH.json``.
    md5 : str
        Of the whole file.
    spare : float
        Times its size that must stay free on the disk, to unpack it.
    persistence : Persistence
        With a server that does not answer as it should.
    show : callable, optional
        Is told of the progress.

    Raises
    ------
    DataError
        The server has no such file, sends another one, or does not answer; or the disk has no room for it.
    """
    require_web(url)
    attempt = _Download(url, part, path, spare, persistence, show or (lambda *_: None))
    attempt.run()
    if (found := attempt.digest()) != md5 and attempt.may_be_mixed:
        logger.warning("%s: what was fetched in parts has another checksum; it is fetched again", url)
        attempt.forget()
        attempt.run()
        found = attempt.digest()
    if found == md5:
        return
    attempt.forget()
    raise DataError(
        f"{url} holds another file than was asked for: its md5 is {found}, needed {md5}; name another mirror by --url"
    )


def require_web(url: str) -> None:
    """Raise unless a URL is one of the web: what lies on this machine needs no fetching."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("https", "http") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise DataError(f"{url} cannot be fetched; needed: https://... (an archive on a disk is unpacked by tar xf)")


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
        self._begun = _Begun.read(self._described, url)
        self._num_parts = 0
        self._num_changes = 0
        self._opener = urllib.request.build_opener(_SafeRedirects())
        if self._begun == _Begun(url=url):  # bytes of unknown origin
            self.forget()

    @property
    def may_be_mixed(self) -> bool:
        """Whether the bytes may be of two files, or end early, and nobody could tell: a server need not say enough."""
        return self._num_parts != 1 or self._begun.total is None

    @property
    def _held(self) -> int:
        return self._part.seek(0, os.SEEK_END)

    @property
    def _is_whole(self) -> bool:
        return self._begun.total is not None and self._held == self._begun.total

    def forget(self) -> None:
        """Begin anew."""
        self._part.truncate(0)
        self._begun = _Begun(url=self._url)
        self._described.unlink(missing_ok=True)

    def _start_again(self) -> NoReturn:
        self.forget()
        self._num_changes += 1
        raise _Passing("the file has changed on the server")

    def run(self) -> None:
        """Ask until everything is there."""
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
        """Ask once, and write what comes.

        Raises
        ------
        _Passing
            There is more, or the server may answer later.
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
        if self._begun.total is not None and self._held < self._begun.total:
            raise _Passing(f"the connection ended after {self._held} of {self._begun.total} bytes")

    def _request(self) -> urllib.request.Request:
        headers = {"User-Agent": f"volseg/{__version__}", "Accept-Encoding": "identity"}
        if self._held:
            headers["Range"] = f"bytes={self._held}-"
            if self._begun.validator is not None:
                headers["If-Range"] = self._begun.validator
        return urllib.request.Request(self._url, headers=headers)  # noqa: S310 (see require_web)

    def _begin(self, response: Any) -> None:
        """Compare an answer with what was begun, and take down what it says of the file."""
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise DataError(f"{self._url} is sent as {encoding}, which nobody asked for; name a mirror by --url")
        start, total = 0, _as_number(response.headers.get("Content-Length"))
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            start, total = _read_range(response.headers.get("Content-Range", ""))
        elif self._held:
            logger.info("%s: the server sends the file from its beginning", self._url)
        changed = start and self._begun.total not in (None, total)
        if start not in (0, self._held) or changed:
            self._start_again()
        self._num_parts = self._num_parts + 1 if start else 1
        self._part.truncate(start)
        self._begun = replace(self._begun, total=total, validator=_find_validator(response.headers))
        self._require_room(total, start)
        self._begun.write(self._described)

    def _require_room(self, total: int | None, held: int) -> None:
        needed = 0 if total is None else total - held + int(self._spare * total)
        if needed > (free := shutil.disk_usage(self._path.parent).free):
            raise DataError(
                f"{self._path.parent} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are needed to "
                "fetch and unpack the archive; free space, or name another folder by --output"
            )

    def _receive(self, response: Any) -> None:
        done = self._held
        try:
            while True:
                self._show("fetching", done, self._begun.total)
                with _hearing(self._url):
                    piece = response.read(PIECE)
                if not piece:
                    return
                if self._part.write(piece) < len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += len(piece)
                if self._begun.total is None and done % CHECKED_EVERY < PIECE:
                    self._require_end(done)
        except OSError as fault:
            raise DataError(
                f"{self._path} cannot be written: {fault.strerror}; free space, or name another folder by --output"
            ) from fault
        finally:
            with suppress(OSError):
                self._part.flush()

    def _require_end(self, done: int) -> None:
        """Raise where a file of unknown length grows beyond every archive, or fills the disk."""
        free = shutil.disk_usage(self._path.parent).free
        if done > MOST_BYTES or free < KEPT_FREE:
            self.forget()
            raise DataError(
                f"{self._url} does not tell its length, and after {done} bytes it has not ended; {free} bytes of the "
                f"disk were free. Allowed are {MOST_BYTES} bytes, and {KEPT_FREE} must stay free; name a "
                "mirror by --url"
            )

    def _take_refusal(self, refusal: urllib.error.HTTPError) -> NoReturn:
        """Say what to do after an answer that is none."""
        if refusal.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._held:
            self._start_again()  # a whole file has no rest to ask for, and is not asked for one
        told = f"{self._url}: the server answers {refusal.code} ({refusal.reason})"
        if refusal.code not in PASSING:
            raise DataError(f"{told}; check the address, or name a mirror by --url")
        wait = _read_wait(refusal.headers.get("Retry-After"))
        if wait is not None and wait > self._persistence.longest_wait:
            raise DataError(f"{told}, and asks to wait {wait:.0f} s; run the same command then: what there is stays")
        raise _Passing(f"the server answers {refusal.code} ({refusal.reason})", wait)

    def _wait(self, failed: int, reason: _Passing) -> None:
        own = self._persistence.first_wait * 2 ** max(failed - 1, 0)
        # Spread, so that those whom one fault sent away do not come back together.
        wait = min(own * random.uniform(0.5, 1.0), self._persistence.longest_wait)  # noqa: S311 (no secret)
        wait = max(wait, reason.wait or 0.0)
        logger.info("%s: %s; going on in %.0f s", self._url, reason, wait)
        time.sleep(wait)

    def digest(self) -> str:
        """Return the md5 of what there is."""
        hashed = hashlib.md5(usedforsecurity=False)
        total, done = self._held, 0
        self._part.seek(0)
        while piece := self._part.read(1 << 20):
            hashed.update(piece)
            done += len(piece)
            self._show("checking", done, total)
        return hashed.hexdigest()


@contextmanager
def _hearing(url: str) -> Iterator[None]:
    """Turn what the network may do to a conversation into `_Passing`; the disk is not spoken to inside."""
    try:
        yield
    except VolsegError:
        raise
    except (http.client.InvalidURL, ValueError, OverflowError) as fault:  # of the address, or of one it leads to
        raise DataError(f"{url} cannot be fetched: {fault}, in its address or in one that it leads to") from fault
    except (OSError, http.client.HTTPException) as fault:  # timeouts and urllib's own errors are OSErrors
        reason = getattr(fault, "reason", fault)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DataError(f"{url}: the server's certificate is not trusted: {reason.verify_message}") from fault
        raise _Passing(str(reason) or type(reason).__name__) from fault


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects inside the web, and never from an encrypted place to an open one."""

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
    """Return where a part begins, and how long the whole is; -1 for what is no part of anything."""
    match = CONTENT_RANGE.fullmatch(text.strip())
    start = None if match is None else _as_number(match[1])
    return (-1, None) if match is None or start is None else (start, _as_number(match[2]))


def _find_validator(headers: Mapping[str, str]) -> str | None:
    """Return what a later request is conditional on; a weak ETag does not say that bytes are the same."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _read_wait(text: str | None) -> float | None:
    """Return how many seconds ``Retry-After`` asks to wait, which may be a date."""
    if text is None or (seconds := _as_number(text.strip())) is not None:
        return None if text is None else float(seconds or 0)
    try:
        moment = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # neither: as if it were not there
        return None
    return max(moment - time.time(), 0.0)
