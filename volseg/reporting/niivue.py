"""NiiVue, the script that draws volumes in a browser: fetched by npm, checked, and kept beside this module.

The repository does not hold it. ``make viewer`` runs ``python -m volseg.reporting.niivue``, and so does the build of a
wheel. Nothing of the package runs on this machine: one file is taken out of its archive.
"""

import base64
import hashlib
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from volseg.commands import run_module
from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.streams import show

__all__ = ["SCRIPT", "fetch_niivue", "read_niivue"]

PACKAGE, VERSION, LICENCE = "@niivue/niivue", "0.69.0", "BSD-2-Clause"
INTEGRITY = "YMjQvJgD1W2b7DuoxkwlC4VxbrgIePRJ5qyQzXKxi2v2MBVg285P/CIQyg46oDDGDIcaNlbd+MhtO/edMbXJkA=="
"""SHA-512 of the package's archive, in base64."""

MEMBER = "package/dist/niivue.umd.js"
SCRIPT = Path(__file__).with_name("niivue.js")


def fetch_niivue(file: Path = SCRIPT) -> Path:
    """Fetch the pinned package by npm and write its script, below its licence, to ``file``.

    Raises
    ------
    ConfigError
        npm is absent or fails, or the archive is another one than the pinned one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("npm fetches NiiVue, and is not installed (Debian: apt install npm)")
    with tempfile.TemporaryDirectory(prefix="volseg_niivue_") as folder:
        command = [npm, "pack", "--ignore-scripts", "--pack-destination", folder, f"{PACKAGE}@{VERSION}"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)  # noqa: S603
        archives = [*Path(folder).glob("*.tgz")]
        if ran.returncode or len(archives) != 1:
            raise ConfigError(f"npm pack {PACKAGE}@{VERSION} failed with status {ran.returncode}: {ran.stderr.strip()}")
        script = _unpack(archives[0])
    licence = SCRIPT.with_suffix(".LICENSE").read_text(encoding="utf-8")
    with replacing(file) as partial:
        partial.write_text(f"/*! {PACKAGE} {VERSION}, {LICENCE}\n\n{licence}*/\n{script}", encoding="utf-8")
    return file


def _unpack(archive: Path) -> str:
    """Return the script in an archive that is the pinned one."""
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise ConfigError(f"npm returned another {PACKAGE} {VERSION}: its SHA-512 is {found}, needed {INTEGRITY}")
    with tarfile.open(archive) as content:
        member = content.extractfile(MEMBER)
        assert member is not None, "the pinned archive holds the file"
        return member.read().decode("utf-8")


def read_niivue() -> str:
    """Return the script.

    Raises
    ------
    ConfigError
        It was not fetched; the message says how to do that.
    """
    if not SCRIPT.is_file():
        raise ConfigError(
            f"volseg view needs {SCRIPT}, which holds {PACKAGE} {VERSION}. Wheels contain it; in a checkout, fetch it "
            f"once: make viewer, or {shlex.join(run_module('volseg.reporting.niivue'))} (npm is needed)"
        )
    return SCRIPT.read_text(encoding="utf-8")


if __name__ == "__main__":
    try:
        show(fetch_niivue())
    except ConfigError as fault:
        raise SystemExit(f"{fault}") from None
