"""Python, packages and the environment's variables."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import Level, MachineFinding, ok

__all__ = ["check_imports", "check_packages", "check_python", "check_text", "check_variables"]


def check_python(facts: Facts) -> list[MachineFinding]:
    """Say which Python it is, and whose packages it has."""
    python = facts.python
    if python is None:
        return []
    told = f"Python {python.version}, {python.executable} (starts processes by {python.start_method})"
    if python.in_environment:
        return [ok("python", told)]
    why = "packages of other projects and of the system get between those of volseg"
    remedy = "python3 -m venv .venv && . .venv/bin/activate && pip install .   (in the checkout)"
    return [MachineFinding(check="python", level="note", found=f"{told}, the system's", why=why, remedy=remedy)]


def check_text(facts: Facts) -> list[MachineFinding]:
    """Say whether names of files may hold any letter."""
    python = facts.python
    if python is None:
        return []
    told = f"{python.locale}, {python.encoding}"
    if python.encoding.lower().replace("-", "") == "utf8":
        return [ok("locale", told)]
    why = "volseg's own files are UTF-8 anywhere; names of cases and folders in other letters may be refused"
    return [MachineFinding(check="locale", level="note", found=told, why=why, remedy="export LC_ALL=C.UTF-8")]


def check_packages(facts: Facts) -> list[MachineFinding]:
    """Say which versions are installed, and which do not fit."""
    packages = facts.packages
    if packages is None:
        return []
    if not packages.is_installed:
        found, why = "imported from a checkout, not installed as a package", "whether packages fit it is not known"
        remedy = "pip install -e . in the checkout"
        return [MachineFinding(check="packages", level="note", found=found, why=why, remedy=remedy)]
    findings = [
        MachineFinding(
            check="packages",
            level="error" if sentence.startswith("volseg ") else "warning",
            found=sentence,
            why="it is not known to work, or known not to",
            remedy=f"pip install {_quote(sentence)}",
        )
        for sentence in packages.unmet
    ]
    findings += [
        MachineFinding(
            check="packages.twice",
            level="warning",
            found=sentence,
            why="which of the two is imported depends on how Python is started",
            remedy=f"pip uninstall {sentence.partition(' ')[0]}, once for each, and install it again",
        )
        for sentence in packages.twice
    ]
    known = ", ".join(f"{name} {version}" for name, version in packages.versions.items() if version)
    return [*findings, *([] if findings else [ok("packages", known)])]


def _quote(sentence: str) -> str:
    """Return what to install, from a sentence such as "a needs b>=2, installed is 1"."""
    needed = sentence.partition(" needs ")[2].partition(", ")
    return (
        f'"{re.split(", (?:installed is|which is not)", sentence.partition(" needs ")[2])[0]}"' if needed else sentence
    )


def check_imports(facts: Facts) -> list[MachineFinding]:
    """Say which libraries are installed and cannot be imported."""
    if facts.imports is None:
        return []
    findings = [
        MachineFinding(
            check="imports",
            level="error",
            found=f"import {name}: {fault}",
            why="images could not be read, or networks not built",
            remedy=f"pip install --force-reinstall --no-deps {name.partition('.')[0]}",
        )
        for name, fault in facts.imports.refused.items()
    ]
    return findings or [ok("imports", "MONAI, nibabel, SimpleITK, isal and what they need can be imported")]


class HarmfulVariable(NamedTuple):
    """What a variable of the environment does."""

    values: str
    """Those that do it, as a pattern for the whole value."""
    level: Level
    why: str


BY_NAME: Mapping[str, HarmfulVariable] = {
    "CUDA_LAUNCH_BLOCKING": HarmfulVariable("1", "warning", "every kernel is waited for, and steps cannot be recorded"),
    "CUDA_VISIBLE_DEVICES": HarmfulVariable(".*", "note", "volseg sees these GPUs alone, and numbers them from 0"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": HarmfulVariable(".+", "warning", "every tensor asks the driver for memory"),
    "PYTORCH_CUDA_ALLOC_CONF": HarmfulVariable(
        ".*backend:cudaMallocAsync.*",
        "warning",
        "steps are not recorded as torch's own allocator lets them, and no forecast knows it",
    ),
    "NCCL_P2P_DISABLE": HarmfulVariable("1", "warning", "GPUs talk over main memory in place of NVLink"),
    "NCCL_SHM_DISABLE": HarmfulVariable("1", "warning", "GPUs without peer access talk over the network"),
    "NCCL_DEBUG": HarmfulVariable("INFO|TRACE", "note", "every process prints hundreds of lines"),
    "TORCH_CUDA_ARCH_LIST": HarmfulVariable(".+", "note", "it counts for what is compiled here, not for torch itself"),
    "TRITON_INTERPRET": HarmfulVariable(
        "1", "error", "kernels are interpreted line by line, thousands of times slower"
    ),
    "LD_PRELOAD": HarmfulVariable(".+", "note", "a library is put into every process before its own"),
    "LD_LIBRARY_PATH": HarmfulVariable(
        "(?i:.*(cuda|cudnn|nccl).*)",
        "warning",
        "torch brings its own CUDA libraries, and those of this folder are taken in their place",
    ),
    "PYTHONHOME": HarmfulVariable(".+", "warning", "Python takes another one's library"),
    "RANK": HarmfulVariable(".+", "warning", "volseg takes itself for one process of a job, and waits for the others"),
}

TOGETHER = {"RANK": "RANK WORLD_SIZE"}
"""What is unset with a variable, as the one means nothing without the other."""


def check_variables(facts: Facts) -> list[MachineFinding]:
    """Say which variables of the environment change what torch, CUDA and NCCL do."""
    variables = facts.python.variables if facts.python is not None else {}
    bad = [name for name, value in variables.items() if name in BY_NAME and re.fullmatch(BY_NAME[name].values, value)]
    findings = [
        MachineFinding(
            check="variables",
            level=BY_NAME[name].level,
            found=f"{name}={variables[name]}",
            why=BY_NAME[name].why,
            remedy=f"unset {TOGETHER.get(name, name)}",
        )
        for name in bad
    ]
    others = [name for name in variables if name.startswith(("NCCL_", "PYTORCH_", "CUDA_", "VOLSEG_", "OMP_"))]
    quiet = [name for name in others if name not in bad]
    return findings + ([ok("variables", ", ".join(f"{name}={variables[name]}" for name in quiet))] if quiet else [])
