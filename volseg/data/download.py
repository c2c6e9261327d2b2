"""Fetch a large file over HTTP, go on with an earlier attempt, and accept the file only if its checksum is right.

urllib sends the requests: it follows the environment's proxies and checks certificates. Missing bytes are requested by
``Range``, after an error of the network or in a later process. The checksum of the whole file decides whether its parts
belong together. pooch and MONAI's ``download_url`` start over each time.
"""

import errno
import hashlib
import http.client
import logging
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from volseg.errors import DataError, VolsegError
from volseg.version import __version__

logger = logging.getLogger(__name__)

ShowBytes = Callable[[str, int, int], object]
"""Called with the current step, its number of bytes so far, and the total."""

PIECE = 1 << 16
"""Bytes of one read; a broken connection loses fewer."""

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a server may answer the same request later."""

CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d+/(\d{1,18})")


TIMEOUT = 60.0
"""Seconds without a byte."""

ATTEMPTS = 8
"""Attempts in a row without a new byte."""

FIRST_WAIT = 1.0
"""Seconds before the second attempt; twice as long before each further one."""


class _Passing(Exception):  # noqa: N818  (no error: another attempt may bring more)
    pass


def download(
    url: str, part: BinaryIO, path: Path, *, md5: str, spare: float = 0.0, show: ShowBytes | None = None
) -> None:
    """Fetch ``url`` into an open file, after the bytes that the file has.

    Parameters
    ----------
    url : str
        ``https`` or ``http``.
    part : binary file
        Open for reading and writing, unbuffered. After an error of the network its bytes stay for another attempt.
    path : Path
        Path of ``part``.
    md5 : str
        Checksum of the whole file.
    spare : float
        Free disk space that is needed to unpack the file, as a multiple of its size.
    show : callable, optional
        Called with the progress.

    Raises
    ------
    DataError
        If the server does not answer, has no such file, does not give its length, or sends another one, or if the disk
        has no room.
    """
    require_web(url)
    show = show or (lambda *_: None)
    _complete(url, part, path, spare, show)
    if (found := _digest(part, show)) != md5:
        part.truncate(0)
        raise DataError(
            f"{url} is not the wanted file, or changed between two parts: its md5 is {found}, needed "
            f"{md5}; try again, or name another mirror by --url"
        )


def _complete(url: str, part: BinaryIO, path: Path, spare: float, show: ShowBytes) -> None:
    """Ask until the file is complete."""
    failed, longest = 0, part.seek(0, os.SEEK_END)
    while True:
        try:
            _ask(url, part, path, spare, show)
            return
        except _Passing as reason:
            held = part.seek(0, os.SEEK_END)
            failed = 0 if held > longest else failed + 1
            longest = max(held, longest)
            if failed >= ATTEMPTS:
                raise DataError(
                    f"{url} cannot be fetched, the last attempt failed as {reason}; {held} bytes are kept: go on by "
                    "the same command, or name a mirror by --url"
                ) from reason
            wait = FIRST_WAIT * 2 ** max(failed - 1, 0)
            logger.info("%s: %s; continuing in %.0f s", url, reason, wait)
            time.sleep(wait)


def _ask(url: str, part: BinaryIO, path: Path, spare: float, show: ShowBytes) -> None:
    """Ask once for the missing bytes, and write the answer.

    Raises
    ------
    _Passing
        If the file is not complete, or the server may answer later.
    """
    held = part.seek(0, os.SEEK_END)
    headers = {"User-Agent": f"volseg/{__version__}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(  # noqa: S310 (see require_web)
        url, headers=headers | ({"Range": f"bytes={held}-"} if held else {})
    )
    try:
        with urllib.request.build_opener(_SafeRedirects()).open(request, timeout=TIMEOUT) as response:
            start, total = _read_lengths(url, response)
            part.truncate(start if start == held else 0)
            if start not in (0, held):
                raise _Passing("the server sends another part of the file")
            _require_room(path.parent, total - start + int(spare * total))
            _receive(response, part, path, start, total, show)
    except VolsegError:
        raise
    except urllib.error.HTTPError as refusal:
        refusal.close()
        if refusal.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and held:
            return  # nothing is missing, or the checksum shows that it is another file
        told = f"the server answers {refusal.code} ({refusal.reason})"
        if refusal.code not in PASSING:
            raise DataError(f"{url}: {told}; check the address, or name a mirror by --url") from refusal
        raise _Passing(told) from refusal
    except (http.client.InvalidURL, ValueError, OverflowError) as fault:
        raise DataError(f"{url} cannot be fetched: {fault}, in this URL or in one that it redirects to") from fault
    except (OSError, http.client.HTTPException) as fault:  # timeouts and urllib's own errors are OSErrors
        reason = getattr(fault, "reason", fault)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DataError(f"{url}: the server's certificate is not trusted: {reason.verify_message}") from fault
        raise _Passing(str(reason) or type(reason).__name__) from fault


def _read_lengths(url: str, response: Any) -> tuple[int, int]:
    """Return the first byte that a server sends, and the length of the whole file."""
    length = response.headers.get("Content-Length", "")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        if (match := CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())) is not None:
            return int(match[1]), int(match[2])
    elif re.fullmatch(r"\d{1,18}", length):
        return 0, int(length)
    raise DataError(f"{url} cannot be fetched: the server does not give the length of the file; name a mirror by --url")


def _receive(response: Any, part: BinaryIO, path: Path, done: int, total: int, show: ShowBytes) -> None:
    part.seek(done)
    show("fetching", done, total)
    while piece := response.read(PIECE):
        try:
            if part.write(piece) < len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as fault:
            raise DataError(
                f"{path} cannot be written: {fault.strerror}; free space, or name another folder by --output"
            ) from fault
        done += len(piece)
        show("fetching", done, total)
    if done < total:
        raise _Passing(f"the connection ended after {done} of {total} bytes")


def _digest(part: BinaryIO, show: ShowBytes) -> str:
    """Return the md5 of the bytes so far."""
    hashed, total = hashlib.md5(usedforsecurity=False), part.seek(0, os.SEEK_END)
    part.seek(0)
    while piece := part.read(1 << 20):
        hashed.update(piece)
        show("checking", part.tell(), total)
    return hashed.hexdigest()


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to web addresses, but not from an encrypted one to an open one."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request."""
        require_web(newurl)
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url} redirects to {newurl}, which is not encrypted; name a mirror by --url")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def require_web(url: str) -> None:
    """Raise unless a URL is one of the web: files on this machine need no fetching."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("https", "http") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise DataError(f"{url} cannot be fetched; needed: https://... (an archive on a disk is unpacked by tar xf)")


def _require_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{folder} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are needed to fetch and unpack "
            "the archive; free space, or name another folder by --output"
        )
