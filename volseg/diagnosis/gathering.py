"""Gather facts by parallel processes, and end processes that do not answer.

Each gatherer is a process in its own group: if it hangs (a GPU that fell off the bus, a dead network disk, an
all-reduce without its partner), it is killed with all its children, and reported. A process that cannot be killed is
left behind.

``python -m volseg.diagnosis.gathering NAME [ROLE=FOLDER ...]`` is such a process. Only its answer goes to the standard
output; the output of libraries (NCCL) goes to the standard error.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from volseg.commands import run_module
from volseg.diagnosis import facts


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """A command that writes one section of the facts as JSON."""

    name: str
    """Field of `Facts`."""
    section: type
    limit_s: float
    """Time limit: many times the duration on a slow machine."""
    is_quick: bool = True
    command: Sequence[str] | None = None
    """Command; by default ``volseg.diagnosis.gathering`` in this interpreter."""


GATHERERS: tuple[Gatherer, ...] = (
    Gatherer(name="python", section=facts.PythonFacts, limit_s=30),
    Gatherer(name="system", section=facts.SystemFacts, limit_s=30),
    Gatherer(name="folders", section=facts.FoldersFacts, limit_s=30),
    Gatherer(name="packages", section=facts.PackageFacts, limit_s=60),
    Gatherer(name="driver", section=facts.DriverFacts, limit_s=60),  # nvidia-smi takes half a minute where GPUs sleep
    Gatherer(name="torch", section=facts.TorchFacts, limit_s=120),
    Gatherer(name="imports", section=facts.ImportFacts, limit_s=180, is_quick=False),
    Gatherer(name="links", section=facts.LinkFacts, limit_s=120, is_quick=False),
    Gatherer(name="all_reduce", section=facts.AllReduceFacts, limit_s=180, is_quick=False),
    Gatherer(name="compiler", section=facts.CompilerFacts, limit_s=180, is_quick=False),
)

GRACE_S = 5.0
"""Time for a killed process to end; one that waits in the kernel for a disk never ends."""

LAST_WORDS = 400
"""Most characters of a process's output in the reason of its end."""


def gather(
    gatherers: Sequence[Gatherer] = GATHERERS, *, folders: Mapping[str, str | Path] | None = None
) -> facts.Facts:
    """Run gatherers in parallel and return their facts.

    Parameters
    ----------
    gatherers
        Gatherers, in any order.
    folders
        Folders of ``cache`` and ``runs``, instead of volseg's defaults.
    """
    places = {key: str(Path(path).absolute()) for key, path in (folders or {}).items()}
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda gatherer: _run(gatherer, places), gatherers))
    sections: dict[str, Any] = {
        gatherer.name: section
        for gatherer, section in zip(gatherers, found, strict=True)
        if not isinstance(section, facts.NotGathered)
    }
    return facts.Facts(
        **sections, failures=tuple(section for section in found if isinstance(section, facts.NotGathered))
    )


def _run(gatherer: Gatherer, places: Mapping[str, str]) -> Any:
    """Return the section from a gatherer's process, or a `NotGathered` with the reason."""
    command = gatherer.command or run_module(
        "volseg.diagnosis.gathering", gatherer.name, *(f"{role}={path}" for role, path in places.items())
    )
    try:
        process = subprocess.Popen(  # noqa: S603 - our own command
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as fault:  # no more processes, no memory
        return facts.NotGathered(
            name=gatherer.name, reason=f"its process could not be started: {fault.strerror or fault}"
        )
    try:
        answer, said = process.communicate(timeout=gatherer.limit_s)
    except subprocess.TimeoutExpired:
        return _end(process, gatherer)
    if process.returncode:
        return facts.NotGathered(name=gatherer.name, reason=_last_words(said) or f"exit status {process.returncode}")
    try:
        return TypeAdapter(gatherer.section).validate_json(answer)
    except ValidationError:
        return facts.NotGathered(
            name=gatherer.name, reason=f"it answered {answer[:LAST_WORDS]!r}, which are no such facts"
        )


def _end(process: "subprocess.Popen[str]", gatherer: Gatherer) -> facts.NotGathered:
    """Kill a process and all its children."""
    reason = f"no answer within {gatherer.limit_s:g} s"
    # The group has the process's id, which is not reused before the process is waited for.
    os.killpg(process.pid, signal.SIGKILL)
    try:
        _, said = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        reason += f"; process {process.pid} cannot be ended either: it waits in the kernel, for a disk or a device"
    else:
        reason += f"; its last words: {_last_words(said)}" if said.strip() else ""
    return facts.NotGathered(name=gatherer.name, reason=reason, timed_out=True)


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][-LAST_WORDS:] if lines else ""


MODULES = {
    **dict.fromkeys(("python", "packages", "imports", "compiler"), "software"),
    **dict.fromkeys(("system", "folders", "driver"), "machine"),
    **dict.fromkeys(("torch", "links", "all_reduce"), "gpus"),
}
"""Modules of `volseg.diagnosis.gatherers` by section; each has its ``gather_SECTION``."""


def _answer(name: str, *assigned: str) -> None:
    """Gather a section, and write it as JSON."""
    answer = os.dup(1)
    os.dup2(2, 1)
    # By name: only a process that needs torch imports it.
    gather = getattr(import_module(f"volseg.diagnosis.gatherers.{MODULES[name]}"), f"gather_{name}")
    places = dict(one.split("=", 1) for one in assigned)
    section = gather(places) if name == "folders" else gather()
    with os.fdopen(answer, "wb") as output:
        output.write(TypeAdapter(type(section)).dump_json(section))


if __name__ == "__main__":
    _answer(*sys.argv[1:])
