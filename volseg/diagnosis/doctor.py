"""Diagnose this machine: gather facts by parallel processes, check them, and print the findings.

Each gatherer is a process in its own group: if it hangs (a GPU that fell off the bus, a dead network disk, an
all-reduce without its partner), it is killed with all its children, and reported. A process that cannot be killed is
left behind.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from volseg.commands import run_module
from volseg.diagnosis import gpu_checks, machine_checks
from volseg.streams import make_printable
from volseg.version import __version__

SCHEMA_VERSION = 4
"""Version of the JSON: raised when a key disappears or changes its meaning."""

LEVELS = ("ok", "note", "warning", "error")
"""Levels from a passed check to a fault that stops a training."""

LIMITS_S = {
    **dict.fromkeys(("python", "system", "folders"), 30.0),
    **dict.fromkeys(("packages", "driver"), 60.0),  # nvidia-smi takes half a minute if GPUs sleep
    **dict.fromkeys(("torch", "links"), 120.0),
    **dict.fromkeys(("all_reduce", "compiler"), 180.0),
}
"""Time limit of each section of the facts: many times the duration on a slow machine."""

TRIALS = ("links", "all_reduce", "compiler")
"""Slow sections, which a quick diagnosis skips."""

GRACE_S = 5.0
"""Time for a killed process to end; one that waits in the kernel for a disk never ends."""

LAST_WORDS = 400
"""Maximum number of characters of a process's output in the reason of its failure."""

Facts = Mapping[str, Any]
"""Values that each gatherer returned, by section; ``failures`` lists the name and reason of each failed gatherer."""


@dataclass(frozen=True)
class MachineFinding:
    """The result of one check.

    ``note``: worth knowing. ``warning``: works, but slower or not for long. ``error``: does not work.
    """

    check: str
    """Name of the check, such as ``gpu.architecture``. Stable, for scripts."""
    level: str
    found: str
    """The value found."""
    why: str = ""
    """Why it matters; empty for a passed check."""
    remedy: str = ""
    """Command to run, or setting to change."""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.why), f"{self.check}: every level except ok needs a reason"
        assert self.level in ("ok", "note") or self.remedy, f"{self.check}: level {self.level} needs a remedy"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings and facts of this machine."""

    findings: Sequence[MachineFinding]
    facts: Facts
    seconds: float
    """Duration of the diagnosis."""

    @property
    def level(self) -> str:
        """Level of the worst finding."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def is_sound(self) -> bool:
        """Whether nothing stops a training."""
        return self.level != "error"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain values."""
        return {
            "schema": SCHEMA_VERSION,
            "volseg": __version__,
            "time": time.time(),
            "seconds": round(self.seconds, 3),
            "level": self.level,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": dict(self.facts),
        }


def diagnose(*, quick: bool = False, cache: str | Path | None = None, runs: str | Path | None = None) -> Diagnosis:
    """Gather facts of this machine and check them.

    Parameters
    ----------
    quick
        Skip the trials: sums over processes, copies between GPUs, compiling a kernel.
    cache, runs
        Folders to check instead of volseg's defaults.
    """
    begun = time.perf_counter()
    facts = gather([name for name in LIMITS_S if not (quick and name in TRIALS)], cache=cache, runs=runs)
    return Diagnosis(findings=check(facts), facts=facts, seconds=time.perf_counter() - begun)


def gather(sections: Iterable[str], **folders: str | Path | None) -> Facts:
    """Run gatherers in parallel and return their facts; ``cache`` and ``runs`` replace volseg's default folders."""
    places = [f"{role}={Path(path).absolute()}" for role, path in folders.items() if path is not None]

    def run(name: str) -> Any:
        arguments = places if name == "folders" else ()
        return ask(name, run_module("volseg.diagnosis.gatherers", name, *arguments), LIMITS_S[name])

    names = list(sections)
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        answers = list(pool.map(run, names))
    told = {name: answer for name, answer in zip(names, answers, strict=True) if "reason" not in answer}
    return {**told, "failures": [answer for answer in answers if "reason" in answer]}


def ask(name: str, command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a command and return the section that it prints as JSON; on failure, ``name``, ``reason``, ``timed_out``."""
    failed = {"name": name, "timed_out": False}
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
        return {**failed, "reason": f"its process could not be started: {fault.strerror or fault}"}
    try:
        answer, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {**failed, "timed_out": True, "reason": f"no answer within {limit_s:g} s; {_end(process)}"}
    if process.returncode:
        return {**failed, "reason": _get_last_words(said) or f"exit status {process.returncode}"}
    try:
        section = json.loads(answer)
    except ValueError:
        section = None
    if not isinstance(section, dict):
        return {**failed, "reason": f"its output is not a JSON object: {answer[:LAST_WORDS]!r}"}
    return section


def _end(process: "subprocess.Popen[str]") -> str:
    """Kill a process and all its children; return its last output."""
    # The id of the group is that of the process, which is not reused before communicate() reaps the process.
    os.killpg(process.pid, signal.SIGKILL)
    try:
        _, said = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} cannot be killed either: it waits in the kernel for a disk or a device"
    return f"its last output: {_get_last_words(said) or 'none'}"


def _get_last_words(said: str) -> str:
    """Return the last line; NCCL's first warning precedes it, as NCCL's errors may omit the cause."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(line[-LAST_WORDS:] for line in [*re.findall("NCCL WARN (.*)", said)[:1], *lines[-1:]])


CHECKS: Sequence[Callable[..., gpu_checks.Said]] = (*machine_checks.CHECKS, *gpu_checks.CHECKS)


def check(facts: Facts) -> list[MachineFinding]:
    """Return the findings of all checks whose sections are available; a check that raises becomes a finding.

    >>> [one.check for one in check({"failures": [{"name": "torch", "reason": "a test", "timed_out": False}]})]
    ['torch']
    """
    found: list[MachineFinding] = []
    for one in CHECKS:
        wanted = inspect.signature(one).parameters.values()
        if any(parameter.default is parameter.empty and parameter.name not in facts for parameter in wanted):
            continue
        sections = {parameter.name: facts.get(parameter.name) for parameter in wanted}
        try:
            found += [MachineFinding(*said) for said in one(**sections)]
        except Exception as fault:  # an unexpected fact must not hide the other findings
            failed = f"this check raised {type(fault).__name__}: {fault}"
            why, remedy = machine_checks.UNKNOWN
            found.append(MachineFinding(one.__name__.removeprefix("check_"), "error", failed, why, remedy))
    return found


STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
MARKS = {"ok": ("✓", "ok"), "note": ("•", "note"), "warning": ("!", "warning"), "error": ("✗", "ERROR")}
"""Marks for terminals with and without Unicode."""


def show_diagnosis(diagnosis: Diagnosis, *, file: TextIO | None = None, width: int | None = None) -> None:
    """Print findings: passed checks, then notes, warnings and errors with their remedies, then their numbers.

    The worst is last, next to the prompt.
    """
    output = file or sys.stdout
    console = Console(file=output, width=width, highlight=False)
    is_plain = "utf" not in (getattr(output, "encoding", None) or "utf-8").lower()
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for one in sorted(diagnosis.findings, key=lambda finding: LEVELS.index(finding.level)):
        text = Text(make_printable(one.found))
        text.append(f"\n{make_printable(one.why)}" if one.why else "", "dim")
        if one.remedy:
            text.append("\nfix: ", "dim").append(make_printable(one.remedy), "bold")
        table.add_row(Text(MARKS[one.level][is_plain], STYLES[one.level]), one.check, text)
    console.print(table)
    levels = [finding.level for finding in diagnosis.findings]
    counts = [
        f"{levels.count(one)} {one}{'' if levels.count(one) == 1 else 's'}" for one in ("error", "warning", "note")
    ]
    told = f"{', '.join(counts)}, {levels.count('ok')} checks passed ({diagnosis.seconds:.0f} s)"
    console.print(Text(told, STYLES[diagnosis.level]))
