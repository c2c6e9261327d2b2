"""Two machines on one: two network namespaces connected by a cable, each with its host name and processes.

`on_two_machines` gives them, and `Machines.torchrun` runs ``torchrun`` on both, joined over the cable. It takes Linux,
root, and ``ip`` (iproute2) and ``unshare`` (util-linux).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29417


def why_not() -> str | None:
    """Return why there cannot be two machines here; None if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]:
        return f"network namespaces need {' and '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "one", "type", "veth"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return None if tried.returncode == 0 else f"network namespaces are not allowed: {tried.stderr.strip()}"


class Machines:
    """Two machines that reach each other, and nobody else."""

    def __init__(self) -> None:
        self.names = [f"volseg{os.getpid()}-{number}" for number in (1, 2)]
        self.started: list[subprocess.Popen] = []

    def connect(self) -> None:
        """Make both and the cable."""
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")

    def cut(self) -> None:
        """Take the cable away: neither hears of the other any more, nor that it is gone."""
        for name in self.names:
            _ip("netns", "exec", name, "ip", "link", "set", "cable", "down")

    def remove(self) -> None:
        """End what runs on them, and undo what `connect` has made."""
        for process in self.started:  # a launcher may wait for one that it cannot reach any more
            process.kill()
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def start(self, number: int, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Start a command on a machine; with it end all processes that it has started there."""
        inside = f'hostname machine{number + 1} && exec "$@"'
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.names[number]),
                *("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"),
                *("sh", "-c", inside, "sh", *command),
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"},
            **options,  # type: ignore[call-overload]
        )
        self.started.append(process)
        return process

    def torchrun(
        self, command: Sequence[str], *, per_machine: int = 1, max_restarts: int = 0, **options: object
    ) -> list[subprocess.Popen]:
        """Start ``torchrun`` on both machines."""
        started = []
        for number, address in enumerate(ADDRESSES):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={per_machine}"]
            meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "--rdzv-id=two"]
            # Names are resolved nowhere here, so that each launcher is told its address, and who keeps the store.
            own = [f"--local-addr={address}", f"--rdzv-conf=is_host={int(number == 0)}"]
            restarts = f"--max-restarts={max_restarts}"
            started.append(self.start(number, [*launcher, *meeting, *own, restarts, *command], **options))
        return started


@contextmanager
def on_two_machines() -> Iterator[Machines]:
    """Give two machines; they and what runs there are gone afterwards."""
    machines = Machines()
    try:
        machines.connect()
        yield machines
    finally:
        machines.remove()


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)
