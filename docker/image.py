"""Build the image where there is no Docker: the base by mmdebstrap, the Dockerfile by buildah, as root on Linux.

``python docker/image.py FOLDER`` leaves the image ``localhost/volseg:cpu`` in ``FOLDER/storage``.

What pip is configured to on this machine (a mirror, a folder of wheels, a certificate) holds in the build as well, by a
secret and by mounts that end with it: nothing of it is in a layer.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BASE, IMAGE = "localhost/volseg-base", "localhost/volseg"
SUITE = "bookworm"
"""The Debian that docker/Dockerfile names as its base."""

TOOLS = ("buildah", "mmdebstrap", "mount", "unshare")
CERTIFICATE = Path("/mnt/pip.pem")
"""Where pip finds this machine's certificates while it builds: apt writes the usual place anew."""


def why_not() -> str | None:
    """Return why no image can be built here; None if one can."""
    if not sys.platform.startswith("linux"):
        return "an image is built on Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"building an image without Docker needs {' and '.join(missing)}"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "mounting needs root, or a container that may"


@dataclass(frozen=True)
class Built:
    """An image in buildah's storage, and what building it took."""

    storage: "Storage"
    name: str
    base_seconds: float
    seconds: float

    def configuration(self) -> dict[str, Any]:
        """Return what a container starts with: entry point, environment, user, health check."""
        return json.loads(self.storage.buildah("inspect", "--type", "image", self.name))["Docker"]["config"]

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Have the image's files in a folder."""
        container = self.storage.buildah("from", "--pull-never", self.name).strip()
        try:
            yield Path(self.storage.buildah("mount", container).strip())
        finally:
            self.storage.buildah("rm", container)


@dataclass(frozen=True)
class Storage:
    """A folder in which buildah keeps images, apart from those of the machine."""

    folder: Path

    def buildah(self, verb: str, *arguments: str | Path, quiet: bool = True) -> str:
        """Run buildah on this storage; show what it says as it says it unless ``quiet``, and return it else."""
        command = ["buildah", "--root", self.folder / "images", "--runroot", self.folder / "running", verb, *arguments]
        ended = subprocess.run(
            list(map(str, command)),
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.PIPE if quiet else None,
            encoding="utf-8",
            check=False,
        )
        if ended.returncode:
            sys.exit(f"buildah {verb} ended with {ended.returncode}: {ended.stderr or 'see above'}")
        return ended.stdout or ""


def build(folder: Path, variant: str = "cpu") -> Built:
    """Make the base and build ``docker/Dockerfile`` on it, in a folder that may be used again."""
    folder.mkdir(parents=True, exist_ok=True)
    storage = Storage(folder / "storage")
    base_seconds = make_base(storage, folder / "base.tar")
    began = time.monotonic()
    name = f"{IMAGE}:{variant}"
    with pip_as_configured_here(folder) as options:
        storage.buildah(
            "bud",
            *("--isolation", "chroot", "--format", "docker", "--pull-never", "--tag", name),
            *("--file", ROOT / "docker" / "Dockerfile", "--ignorefile", ROOT / "docker" / "Dockerfile.dockerignore"),
            *("--build-arg", f"BASE={BASE}", "--build-arg", f"VARIANT={variant}"),
            *options,
            ROOT,
            quiet=False,
        )
    return Built(storage, name, base_seconds, time.monotonic() - began)


def remove(folder: Path) -> None:
    """Remove the folder of a build; buildah leaves file systems mounted in it."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    places = [Path(line.split()[1]) for line in mounts]
    for place in reversed([place for place in places if place.is_relative_to(folder.resolve())]):
        subprocess.run(["umount", place], check=True)
    shutil.rmtree(folder)


def make_base(storage: Storage, archive: Path) -> float:
    """Let mmdebstrap make the smallest Debian, as which the base is published; return the seconds it took."""
    began = time.monotonic()
    if not archive.exists():
        partial = archive.with_suffix(".partial.tar")
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", SUITE, str(partial)], check=True)
        partial.rename(archive)
    container = storage.buildah("from", "scratch").strip()
    storage.buildah("add", container, archive, "/")
    storage.buildah("commit", "--format", "docker", "--rm", container, BASE)
    return time.monotonic() - began


@contextmanager
def pip_as_configured_here(folder: Path) -> Iterator[list[str]]:
    """Give buildah's options by which pip in the build is configured as pip is here."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, encoding="utf-8", check=True
    ).stdout
    settings = parse_pip_settings(listed)
    options = []
    if "cert" in settings:
        options += ["--volume", f"{settings['cert']}:{CERTIFICATE}:ro"]
        settings["cert"] = str(CERTIFICATE)
    for place in map(Path, settings.get("find-links", "").split()):
        if place.is_dir():
            options += ["--volume", f"{place}:{place}:ro"]
            if any(place.glob("torch-*.whl")):
                options += ["--build-arg", f"TORCH_INDEX={place.as_uri()}"]  # PyTorch's own index may not be reached
    file = folder / "pip.conf"
    file.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]), encoding="utf-8")
    try:
        yield [*options, "--secret", f"id=pip,src={file}"]
    finally:
        file.unlink()


def parse_pip_settings(listed: str) -> dict[str, str]:
    """Return what ``pip config list`` says of where packages come from; the environment counts before files.

    Further indexes that are folders of this machine are left out: PyPI has what they have.
    """
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in {"global", "install", ":env:"} and (section == ":env:" or name not in found):
            found[name] = value.strip("'\"").replace("\\n", " ")
    wanted = {"cert", "extra-index-url", "find-links", "index-url", "proxy", "retries", "timeout", "trusted-host"}
    kept = {name: value for name, value in found.items() if name in wanted}
    if "extra-index-url" in kept:
        reached = [index for index in kept["extra-index-url"].split() if not index.startswith("file:")]
        kept["extra-index-url"] = " ".join(reached)
    return {name: value for name, value in kept.items() if value}


def main(arguments: Sequence[str]) -> None:
    """Build into the folder that the command line names."""
    (folder,) = arguments
    if (reason := why_not()) is not None:
        sys.exit(reason)
    built = build(Path(folder))
    print(f"{built.name}: base {built.base_seconds:.0f} s, image {built.seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
