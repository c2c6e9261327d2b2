"""Run an image as ``docker run --read-only --tmpfs /tmp`` does, where there is no Docker: by namespaces alone, as root.

Its entry point is process 1 of its own, the user the image's, the root file system read-only, ``/dev/shm`` has 64 MB as
Docker gives, and no privilege is left. The network is the machine's.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Container", "start"]

SHARED_MEMORY = "64m"
"""Docker's default."""

SETUP = """
set -e
mount --make-rprivate /
mount --bind {root} {root}
touch {root}/etc/hosts
mount --bind /etc/hosts {root}/etc/hosts
mount -o remount,bind,ro {root}
mount -t proc proc {root}/proc
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mount -t tmpfs -o mode=755 tmpfs {root}/dev
for device in null zero full random urandom; do
    touch {root}/dev/$device
    mount --bind /dev/$device {root}/dev/$device
done
ln -s /proc/self/fd {root}/dev/fd
mkdir {root}/dev/shm
mount -t tmpfs -o mode=1777,size={shared_memory} tmpfs {root}/dev/shm
{mounts}
exec {inside} {command}
"""
"""Everything is mounted in a namespace that goes with the container; names such as localhost are the machine's."""


class Container:
    """What runs in a container; ``inside`` is what runs a command in it, seen from its own namespace of mounts."""

    def __init__(self, process: subprocess.Popen, inside: Sequence[str]) -> None:
        self._process, self._inside = process, inside

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to process 1 of the container, as ``docker stop`` does."""
        os.kill(self._running(), number)

    def execute(self, command: Sequence[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command beside what runs, as ``docker exec`` and health checks do."""
        enter = ["nsenter", "--target", str(self._running()), "--mount", "--pid", "--ipc", "--uts"]
        return subprocess.run(
            [*enter, *self._inside, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=timeout_seconds,
            check=False,
        )

    def _first_process(self) -> int | None:
        """Return what process 1 of the container is outside of it; None before it is there and after it has ended."""
        outside = self._process.pid
        children = Path(f"/proc/{outside}/task/{outside}/children").read_text(encoding="ascii").split()
        return int(children[0]) if children else None

    def _running(self) -> int:
        if (first := self._first_process()) is None:
            raise ProcessLookupError("the container is not running")
        return first

    def wait(self, timeout_seconds: float) -> int:
        """Return the exit status; end everything in the container if that takes longer."""
        try:
            return self._process.wait(timeout_seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs: with process 1 of a namespace the others end."""
        while self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._first_process() or self._process.pid, signal.SIGKILL)
            time.sleep(0.05)


def start(
    root: Path,
    configuration: Mapping[str, Any],
    arguments: Sequence[str] = (),
    *,
    mounts: Mapping[str, Path],
    read_only: Mapping[str, Path] | None = None,
    entry_point: Sequence[str] | None = None,
    user: str | None = None,
    output: BinaryIO | int | None = None,
) -> Container:
    """Start a container.

    Parameters
    ----------
    root : Path
        The image's files, mounted.
    configuration : Mapping
        The image's ``Entrypoint``, ``Env`` and ``User``.
    arguments : Sequence of str
        What stands behind the image's name.
    mounts, read_only : Mapping from str to Path
        Folders of this machine by their place in the container.
    entry_point : Sequence of str, optional
        In place of the image's.
    user : str, optional
        ``UID:GID`` in place of the image's.
    output : file or int, optional
        Where standard output and error go.
    """
    user_id, _, group = (user or configuration["User"]).partition(":")
    drop = ["/usr/bin/setpriv", "--reuid", user_id, "--regid", group, "--clear-groups", "--no-new-privs"]
    drop += ["--bounding-set=-all", "--inh-caps=-all", "--"]
    inside = ["chroot", str(root), *drop, "/usr/bin/env", "-i", *configuration["Env"]]
    bound = [_bind(source, root, place) for place, source in {**mounts, **(read_only or {})}.items()]
    bound += [f"mount -o remount,bind,ro {_quoted_place(root, place)}" for place in read_only or {}]
    script = SETUP.format(
        root=shlex.quote(str(root)),
        shared_memory=SHARED_MEMORY,
        mounts="\n".join(bound),
        inside=shlex.join(inside),
        command=shlex.join([*(entry_point or configuration["Entrypoint"]), *arguments]),
    )
    command = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "sh", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    return Container(process, inside)


def _bind(source: Path, root: Path, place: str) -> str:
    return f"mount --bind {shlex.quote(str(source))} {_quoted_place(root, place)}"


def _quoted_place(root: Path, place: str) -> str:
    return shlex.quote(f"{root}/{place.lstrip('/')}")
