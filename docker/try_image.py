"""Build the image without Docker, and use it as its users do.

``python docker/try_image.py --result FILE`` keeps what it took. As user 1000, on a read-only root file system, with the
64 MB of shared memory that Docker gives: the quickstart begins, its health check answers, it gets SIGTERM in the middle
and must end with a checkpoint within the grace of ``docker/compose.yaml``; ``--resume`` goes on; TensorBoard shows the
run; users other than 1000 can use the image.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from container import Container, start
from image import Built, build, remove, why_not

GRACE_SECONDS = 120
"""As in docker/compose.yaml."""

LIMIT_SECONDS = 1800
"""For each wait: something hangs that takes longer."""

RUN = "quickstart"
"""Its folder among the runs."""


class Trial:
    """An image with the folders that its users mount."""

    def __init__(self, built: Built, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.configuration = built.configuration()
        self.runs, self.cache = folder / "runs", folder / "cache"
        for place in (self.runs, self.cache):
            place.mkdir()
            os.chown(place, 1000, 1000)
        self.cache.chmod(0o1777)  # as in the image, from which Docker makes a new volume
        self.log = folder / "log.txt"
        self.configuration["Env"] = [*self.configuration["Env"], f"VOLSEG_RUN=/runs/{RUN}"]

    @property
    def run(self) -> Path:
        """The run, seen from this machine."""
        return self.runs / RUN

    @contextmanager
    def container(self, *arguments: str, **more: Any) -> Iterator[Container]:
        """Start a container with the mounts of ``docker/compose.yaml``."""
        with self.log.open("ab") as output:
            given = {"mounts": {"/runs": self.runs, "/cache": self.cache}, "output": output, **more}
            container = start(self.root, self.configuration, arguments, **given)
        try:
            yield container
        finally:
            container.end()

    def ask(self, command: Sequence[str], **more: Any) -> str:
        """Return what a command in a container of its own says; it must end well."""
        told = self.folder / "told.txt"
        with told.open("wb") as output, self.container(entry_point=command, output=output, **more) as container:
            status = container.wait(LIMIT_SECONDS)
        said = told.read_text(encoding="utf-8")
        require(status == 0, f"{' '.join(command)} ended with {status}: {said}")
        return said

    def state(self) -> dict[str, Any]:
        """Return what the run says of itself, an empty one before it says anything."""
        file = self.run / "status.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def main() -> None:
    """Build, try, and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where images are kept, to build faster; default none is kept")
    parser.add_argument("--result", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(reason)
    kept = arguments.folder or Path(tempfile.mkdtemp(prefix="volseg-image-"))
    trial_folder = Path(tempfile.mkdtemp(prefix="volseg-trial-"))
    try:
        built = build(kept)
        with built.mounted() as root:
            result = {"command": "python docker/try_image.py", **try_image(Trial(built, root, trial_folder))}
            result["build_seconds"] = {"base": round(built.base_seconds, 1), "image": round(built.seconds, 1)}
    finally:
        shutil.rmtree(trial_folder)
        if arguments.folder is None:
            remove(kept)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.result is not None:
        arguments.result.write_text(text + "\n", encoding="utf-8")


def try_image(trial: Trial) -> dict[str, Any]:
    """Use the image; return what it took."""
    result: dict[str, Any] = {"cores": os.cpu_count(), "size": measure_size(trial.root)}
    result["versions"] = json.loads(trial.ask(["python", "-c", VERSIONS]))
    result["compiler"] = trial.ask(["/bin/sh", "-c", COMPILE]).strip()
    result["other_user"] = trial.ask(["python", "-c", OTHER_USER], user="4321:4321").strip()
    try:
        result |= interrupt(trial)
        result |= go_on(trial)
    except BaseException:
        print(trial.log.read_text(encoding="utf-8"), file=sys.stderr)
        raise
    result["tensorboard"] = look_at_tensorboard(trial)
    result["load"] = os.getloadavg()
    return result


VERSIONS = """
import json, sys, torch, volseg
print(json.dumps({"python": sys.version.split()[0], "torch": torch.__version__, "volseg": volseg.__version__}))
"""

COMPILE = """
set -e
include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
echo '#include <Python.h>' | gcc -I"$include" -shared -fPIC -x c -o /tmp/launcher.so -
echo "gcc builds against Python's headers"
"""
"""As Triton does for each kernel."""

OTHER_USER = """
import getpass, os, pathlib, tempfile
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
pathlib.Path(tempfile.mkdtemp()).rmdir()
print(f"user {os.getuid()} is called {getpass.getuser()}, compiles into {cache_dir()}")
"""
"""A user without a line in /etc/passwd, as with ``docker run --user``."""


def measure_size(root: Path) -> dict[str, float]:
    """Return the megabytes of the image, and of its largest parts."""
    parts = {
        "all": ".",
        "torch": "opt/volseg/lib/python3.11/site-packages/torch",
        "packages": "opt/volseg",
        "debian": "usr",
    }
    sizes = {}
    for name, place in parts.items():
        told = subprocess.run(["du", "-sxm", root / place], capture_output=True, encoding="utf-8", check=True).stdout
        sizes[f"{name}_mb"] = int(told.split()[0])
    return sizes


def interrupt(trial: Trial) -> dict[str, Any]:
    """Start the quickstart, ask for its health, stop it in the middle."""
    began = time.monotonic()
    check = trial.configuration["Healthcheck"]["Test"]
    require(check[0] == "CMD", f"a health check in exec form was expected, not {check}")
    with trial.container("quickstart", "--output", f"/runs/{RUN}") as container:
        wait_until(lambda: (trial.state().get("batch") or 0) >= 1, container, "the first batch")
        first_batch = time.monotonic() - began
        wait_until(lambda: (trial.state().get("batch") or 0) >= 10, container, "the tenth batch")
        health = container.execute(check[1:], 60)
        require(health.returncode == 0, f"the health check ended with {health.returncode}: {health.stdout}")
        first = container.execute(["/bin/sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline; id -u"], 60).stdout
        require(first.startswith("/usr/bin/tini") and first.split()[-1] == "1000", f"process 1 is {first}")
        told = time.monotonic()
        container.stop(signal.SIGTERM)
        status = container.wait(GRACE_SECONDS)
        ending = time.monotonic() - told
    require(status == 128 + signal.SIGTERM, f"after SIGTERM the exit status is {status}, not 143")
    require((trial.run / "checkpoints" / "latest.pt").exists(), "SIGTERM left no checkpoint")
    return {
        "seconds_to_first_batch": round(first_batch, 1),
        "health": health.stdout.strip(),
        "seconds_from_sigterm_to_end": round(ending, 1),
        "status_after_sigterm": status,
        "interrupted_after": {name: trial.state()[name] for name in ("state", "epoch", "batch", "batches")},
    }


def go_on(trial: Trial) -> dict[str, Any]:
    """Resume; everything in the run folder must be the user's."""
    began = time.monotonic()
    # The epoch that was interrupted and one more show that it goes on.
    epochs = trial.state()["epoch"] + 2  # those that are done are counted
    arguments = ("train", f"/runs/{RUN}/config.yaml", "--resume", "--set", f"training.epochs={epochs}")
    with trial.container(*arguments) as container:
        status = container.wait(LIMIT_SECONDS)
    require(status == 0, f"the resumed training ended with {status}")
    report = (trial.run / "report.md").read_text(encoding="utf-8")
    require(re.search(r"Anterior.*0\.\d", report) is not None, f"no Dice in the report: {report}")
    foreign = [str(path) for path in trial.runs.rglob("*") if path.stat().st_uid != 1000]
    require(not foreign, f"not the user's: {foreign}")
    return {
        "seconds_resumed": round(time.monotonic() - began, 1),
        "dice": re.findall(r"^\|.*Dice.*|^\| mean.*", report, re.M),
    }


def look_at_tensorboard(trial: Trial) -> str:
    """Serve the runs, which may not be written to, and ask which there are."""
    port = 16006
    command = ["/usr/bin/tini", "--", "tensorboard", "--logdir", "/runs", "--port", str(port), "--host", "127.0.0.1"]
    mounts = {"mounts": {"/cache": trial.cache}, "read_only": {"/runs": trial.runs}}
    with trial.container(entry_point=command, **mounts) as container:
        wait_until(lambda: f"{RUN}/tensorboard" in get(port), container, "TensorBoard with the run")
        runs = get(port)
        container.stop(signal.SIGTERM)
        container.wait(GRACE_SECONDS)
    return runs


def get(port: int) -> str:
    """Return the runs that TensorBoard names, nothing while it starts."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def wait_until(reached: Callable[[], bool], container: Container, what: str) -> None:
    """Wait for something that happens while a container runs."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        require(container.status is None, f"the container ended with {container.status} before {what}")
        require(time.monotonic() < deadline, f"{what} did not come within {LIMIT_SECONDS} s")
        time.sleep(0.05)


def require(condition: bool, otherwise: str) -> None:
    """End the trial if something is not as it must be."""
    if not condition:
        raise SystemExit(f"docker/try_image.py: {otherwise}")


if __name__ == "__main__":
    main()
