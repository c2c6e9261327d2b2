"""Write a file so that a reader, or the next run, finds the old one or the new one and never half of either."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file to write beside ``path``; it takes the place of ``path`` once the block ends well.

    Whatever fails in the block (a full disk, an interrupt) leaves ``path`` as it was and removes the partial file.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "score.txt"
    >>> with replacing(target) as partial:
    ...     _ = partial.write_text("0.89")
    >>> target.read_text(encoding="utf-8"), len(list(target.parent.iterdir()))
    ('0.89', 1)
    """
    path = Path(path)
    # Same folder, hence same file system: only there is the replacement one step. The suffix keeps it out of globs.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())  # else a power cut may keep the new name and lose the bytes
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
