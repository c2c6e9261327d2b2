"""Fetch a large file over HTTP, continue an earlier attempt, and accept the file only if its checksum is right.

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
"""Seconds to wait for the next byte."""

ATTEMPTS = 8
"""Failed attempts in a row, without a new byte, before an error."""

FIRST_WAIT = 1.0
"""Seconds before the second attempt; doubled before each further one."""


class _Passing(Exception):  # noqa: N818  (not an error: another attempt may get further)
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
        Open for reading and writing, unbuffered. After a network error its bytes are kept for another attempt.
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
        If the server does not answer, has no such file, does not give its length, or sends another file, or if the disk
        is full.
    """
    require_web(url)
    show = show or (lambda *_: None)
    _complete(url, part, path, spare, show)
    if (found := _digest(part, show)) != md5:
        part.truncate(0)
        raise DataError(
            f"{url} is not the expected file, or changed between two attempts: its md5 is {found}, needed: {md5}; try "
            "again, or name another mirror with --url"
        )


def _complete(url: str, part: BinaryIO, path: Path, spare: float, show: ShowBytes) -> None:
    """Send requests until the file is complete."""
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
                    f"{url} cannot be fetched; the last attempt failed: {reason}. {held} bytes are kept: continue with "
                    "the same command, or name a mirror with --url"
                ) from reason
            wait = FIRST_WAIT * 2 ** max(failed - 1, 0)
            logger.info("%s: %s; continuing in %.0f s", url, reason, wait)
            time.sleep(wait)


def _ask(url: str, part: BinaryIO, path: Path, spare: float, show: ShowBytes) -> None:
    """Request the missing bytes once, and write the response.

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
                raise _Passing("the server sent another part of the file")
            _require_room(path.parent, total - start + int(spare * total))
            _receive(response, part, path, start, total, show)
    except VolsegError:
        raise
    except urllib.error.HTTPError as refusal:
        refusal.close()
        if refusal.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and held:
            return  # no byte is missing, or the checksum will show that the file is another one
        told = f"the server answered {refusal.code} ({refusal.reason})"
        if refusal.code not in PASSING:
            raise DataError(f"{url}: {told}; check the address, or name a mirror with --url") from refusal
        raise _Passing(told) from refusal
    except (http.client.InvalidURL, ValueError, OverflowError) as fault:
        raise DataError(f"{url} cannot be fetched: {fault}, in this URL or in one that it redirects to") from fault
    except (OSError, http.client.HTTPException) as fault:  # timeouts and urllib's own errors are OSErrors
        reason = getattr(fault, "reason", fault)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DataError(
                f"{url}: certificate not trusted: {reason.verify_message}; name a mirror with --url"
            ) from fault
        raise _Passing(str(reason) or type(reason).__name__) from fault


def _read_lengths(url: str, response: Any) -> tuple[int, int]:
    """Return the first byte that a server sends, and the length of the whole file."""
    length = response.headers.get("Content-Length", "")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        if (match := CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())) is not None:
            return int(match[1]), int(match[2])
    elif re.fullmatch(r"\d{1,18}", length):
        return 0, int(length)
    raise DataError(f"{url} cannot be fetched: the server does not send the file's length; name a mirror with --url")


def _receive(response: Any, part: BinaryIO, path: Path, done: int, total: int, show: ShowBytes) -> None:
    part.seek(done)
    show("fetching", done, total)
    while piece := response.read(PIECE):
        try:
            if part.write(piece) < len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as fault:
            raise DataError(
                f"{path} cannot be written: {fault.strerror}; free space, or name another folder with --output"
            ) from fault
        done += len(piece)
        show("fetching", done, total)
    if done < total:
        raise _Passing(f"the connection ended after {done} of {total} bytes")


def _digest(part: BinaryIO, show: ShowBytes) -> str:
    """Return the md5 of the file's bytes."""
    hashed, total = hashlib.md5(usedforsecurity=False), part.seek(0, os.SEEK_END)
    part.seek(0)
    while piece := part.read(1 << 20):
        hashed.update(piece)
        show("checking", part.tell(), total)
    return hashed.hexdigest()


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to web addresses, but not from HTTPS to HTTP."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request."""
        require_web(newurl)
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url} redirects to {newurl}, which is not encrypted; name a mirror with --url")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def require_web(url: str) -> None:
    """Raise unless a URL is a web address: files on this machine need no download."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("https", "http") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise DataError(f"{url} cannot be fetched; needed: https://... (unpack a local archive with tar xf)")


def _require_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{folder} has {free / 2**30:.1f} GiB free, but {needed / 2**30:.1f} GiB are needed to fetch and unpack "
            "the archive; free space, or name another folder with --output"
        )
