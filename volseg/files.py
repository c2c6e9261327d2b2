"""Replace files atomically, so that a reader finds either the old or the new one; read bounded text; check names."""

import codecs
import errno
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from volseg.errors import ConfigError, VolsegError

PARTIAL = re.compile(r"\..+\.[0-9a-f]{7}\.partial")
"""Names of files that are being written, or were being written when their process was killed."""

PARTIAL_SECONDS = 24 * 3600.0
"""Time after which an unchanged partial file belongs to a killed process."""

NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not correspond to a byte of a file name. JSON and YAML can contain them as escapes."""


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a file.

    Raises
    ------
    OSError
        If the file cannot be read, or contains more than ``most`` bytes: a device may be endless.
    """
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it contains more than {most} bytes", os.fspath(path))
    return content


def decode_text(content: bytes) -> str:
    """Decode UTF-8 with or without a byte order mark.

    Raises
    ------
    ValueError
        If the content is not UTF-8. The message completes "FILE is ...".
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("text in UTF-16, as PowerShell writes it, not in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not text in UTF-8 ({fault})") from fault


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    previous: str | os.PathLike[str] | None = None,
    flush: bool = True,
    make_folder: bool = True,
) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; it replaces ``path`` when the block succeeds.

    If the block fails (a full disk, an interrupt), ``path`` is unchanged and the temporary file is removed.

    Parameters
    ----------
    path : path
        File to write.
    previous : path, optional
        Name, in the same folder, for the former content of ``path``. At least one of the two always exists.
    flush : bool
        Wait until the bytes are on disk. Without it, a power cut may keep the new name but lose the bytes.
    make_folder : bool
        Create a missing folder. Without it, `FileNotFoundError` reports the missing folder.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "score.txt"
    >>> with replacing(target) as partial:
    ...     _ = partial.write_text("0.89")
    >>> target.read_text(encoding="utf-8"), len(list(target.parent.iterdir()))
    ('0.89', 1)
    """
    require_text(path, "a file to write")
    path = Path(path)
    partial = name_partial(path)
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with partial.open("rb+") as written:
            if flush:
                os.fsync(written.fileno())
        if previous is not None and path.is_file():
            _rename_too(path, Path(previous))
        os.replace(partial, path)
        if flush:
            _flush_names(path.parent)
    except OSError as fault:
        if fault.errno is not None and fault.filename is None:  # a full disk
            fault.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def require_writable(folder: str | os.PathLike[str]) -> Path:
    """Return ``folder`` as a path if files can be written there, or if it can be created; create nothing yet.

    Raises
    ------
    ConfigError
        If ``folder`` is not a path or not text, or if it or a parent is not a folder or is not writable.

    Examples
    --------
    >>> require_writable("runs/first").name
    'first'
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"an output folder must be a path, such as 'runs/first', got {folder!r}")
    require_text(folder, "a folder to write to")
    path = Path(folder)
    above = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "is not writable" if above.is_dir() else "is not a folder"
        raise ConfigError(f"{path} cannot be written to, because {above} {what}; choose another folder")
    return path


def require_text(content: object, what: str, error: type[VolsegError] = ConfigError) -> None:
    r"""Raise unless a path, or every text in lists and mappings, can be written as UTF-8.

    File names are bytes. Python decodes bytes that are not UTF-8 to surrogates, which a config, report or table cannot
    contain. Call this function where names enter: at the command line, for data sets, for folders to predict and to
    evaluate, and before a file is written.

    Parameters
    ----------
    content : path, str, bytes, list or dict
        A path, or the values of a JSON or YAML file.
    what : str
        Subject of the message, such as ``a case``.
    error : type
        Type of the exception.

    Raises
    ------
    ConfigError, or ``error``
        The message shows the name with its bytes.

    Examples
    --------
    >>> require_text("M\udcfcller", "a case")
    Traceback (most recent call last):
    volseg.errors.ConfigError: a case is 'M\xfcller', which is not valid UTF-8; rename it, for example in ASCII
    """
    if isinstance(content, Mapping | list | tuple):
        for item in [*content, *content.values()] if isinstance(content, Mapping) else content:
            require_text(item, what, error)
    elif isinstance(content, str | bytes | os.PathLike):
        _require_utf8(os.fsdecode(content), what, error)


def _require_utf8(text: str, what: str, error: type[VolsegError]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        of_bytes = NO_BYTE.search(text) is None
        content = text.encode("utf-8", "surrogateescape" if of_bytes else "backslashreplace")
        shown, remedy = content.decode("utf-8", "backslashreplace"), "rename it, for example in ASCII"
        if of_bytes and shown.encode() == content:  # the name is UTF-8, but Python decodes names in another encoding
            remedy = f"this Python decodes names as {sys.getfilesystemencoding()}: set PYTHONUTF8=1"
        raise error(f"{what} is '{shown}', which is not valid UTF-8; {remedy}") from None


def remove_partials(folder: Path, pattern: str = ".*.partial", latest: float = math.inf) -> None:
    """Remove the temporary files of killed processes from ``folder``.

    If other processes may write there, ``latest``, a time of modification, must be at least `PARTIAL_SECONDS` ago.
    """
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):
            # An export to this folder writes a partial folder.
            if PARTIAL.fullmatch(file.name) and not file.is_dir() and file.stat().st_mtime <= latest:
                file.unlink()


def digest_file(path: Path) -> str:
    """Return 32 hexadecimal digits that identify the content of a file."""
    with path.open("rb") as content:
        return file_digest(content, lambda: blake2b(digest_size=16)).hexdigest()


def name_partial(path: Path) -> Path:
    """Return a new temporary path next to ``path``, for `replacing`; its name is always 17 bytes longer."""
    # The same folder is on the same file system: only there is the replacement atomic. The suffix excludes the file
    # from globs. The digits are random, since two threads may write the same file, and so may processes of two
    # containers, which may have the same ids.
    return path.with_name(f".{path.name}.{os.urandom(4).hex()[:7]}.partial")


def _rename_too(path: Path, previous: Path) -> None:
    """Give the file at ``path`` the second name ``previous``."""
    link = name_partial(previous)
    try:
        os.link(path, link)
        os.replace(link, previous)
    except OSError:  # a file system without hard links: move the file instead
        os.replace(path, previous)
    finally:
        link.unlink(missing_ok=True)  # replacing one hard link by another of the same file leaves both


def _flush_names(folder: Path) -> None:
    """Flush the folder's entries to disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as fault:
        if fault.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(descriptor)


def require_new(*paths: str | Path, overwrite: bool = False) -> None:
    """Raise `ConfigError` if a file exists and the user did not ask to overwrite it."""
    if not overwrite and (there := [path for path in paths if Path(path).exists()]):
        raise ConfigError(f"{there[0]} exists; choose another path, or use --overwrite to replace it")


CACHE_VARIABLE = "VOLSEG_CACHE"
"""Environment variable: the cache folder, or ``none``."""


def choose_user_cache() -> str | None:
    """Return ``volseg`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``; None for a user without a home folder."""
    above = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if above.startswith("~") else os.path.join(above, "volseg")


def choose_cache_folder(wanted: str) -> Path | None:
    """Return the folder for a value of ``data.cache``, or None for no cache.

    ``auto`` means ``$VOLSEG_CACHE``, else the folder of `choose_user_cache`.
    """
    if wanted == "auto":
        wanted = os.environ.get(CACHE_VARIABLE) or choose_user_cache() or "none"
    return None if wanted == "none" else Path(os.path.abspath(os.path.expanduser(wanted)))


def replace_nan(value: Any) -> Any:
    """Return plain values for JSON, in which NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {key: replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
