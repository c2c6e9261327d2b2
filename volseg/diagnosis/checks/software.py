"""Python, packages and the environment's variables."""

import re
from collections.abc import Mapping

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
    return [
        MachineFinding(
            check="python",
            level="note",
            found=f"{told}, the system's",
            why="packages of other projects and of the system get between those of volseg",
            remedy="python3 -m venv .venv && . .venv/bin/activate && pip install volseg",
        )
    ]


def check_text(facts: Facts) -> list[MachineFinding]:
    """Say whether names of files may hold any letter."""
    python = facts.python
    if python is None:
        return []
    if python.encoding.lower().replace("-", "") == "utf8":
        return [ok("locale", f"{python.locale}, {python.encoding}")]
    return [
        MachineFinding(
            check="locale",
            level="note",
            found=f"{python.locale}, {python.encoding}",
            why="volseg's own files are UTF-8 anywhere; names of cases and folders in other letters may be refused",
            remedy="export LC_ALL=C.UTF-8",
        )
    ]


def check_packages(facts: Facts) -> list[MachineFinding]:
    """Say which versions are installed, and which do not fit."""
    packages = facts.packages
    if packages is None:
        return []
    if not packages.is_installed:
        return [
            MachineFinding(
                check="packages",
                level="note",
                found="imported from a checkout, not installed as a package",
                why="whether the packages fit what it requires is not known",
                remedy="pip install -e . in the checkout",
            )
        ]
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


def _note(level: Level, why: str, remedy: str) -> tuple[Level, str, str]:
    return level, why, remedy


BY_VALUE: Mapping[str, tuple[re.Pattern[str], tuple[Level, str, str]]] = {
    "CUDA_LAUNCH_BLOCKING": (
        re.compile("1"),
        _note("warning", "every kernel is waited for, and steps cannot be recorded", "unset CUDA_LAUNCH_BLOCKING"),
    ),
    "CUDA_VISIBLE_DEVICES": (
        re.compile(".*"),
        _note("note", "volseg sees these GPUs alone, and numbers them from 0", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        re.compile(".+"),
        _note("warning", "every tensor asks the driver for memory", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ),
    "PYTORCH_CUDA_ALLOC_CONF": (
        re.compile(".*backend:cudaMallocAsync.*"),
        _note(
            "warning",
            "steps are not recorded as torch's own allocator lets them, and no forecast knows it",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
    ),
    "NCCL_P2P_DISABLE": (
        re.compile("1"),
        _note("warning", "GPUs talk over main memory in place of NVLink", "unset NCCL_P2P_DISABLE"),
    ),
    "NCCL_SHM_DISABLE": (
        re.compile("1"),
        _note("warning", "GPUs without peer access talk over the network", "unset NCCL_SHM_DISABLE"),
    ),
    "NCCL_DEBUG": (
        re.compile("INFO|TRACE"),
        _note("note", "every process prints hundreds of lines", "unset NCCL_DEBUG"),
    ),
    "NCCL_LAUNCH_MODE": (
        re.compile("GROUP"),
        _note("warning", "sums beside a recorded step may hang", "unset NCCL_LAUNCH_MODE"),
    ),
    "TORCH_CUDA_ARCH_LIST": (
        re.compile(".+"),
        _note("note", "it counts for what is compiled here, not for torch itself", "unset TORCH_CUDA_ARCH_LIST"),
    ),
    "TRITON_INTERPRET": (
        re.compile("1"),
        _note("error", "kernels are interpreted line by line, thousands of times slower", "unset TRITON_INTERPRET"),
    ),
    "LD_PRELOAD": (
        re.compile(".+"),
        _note("note", "a library is put into every process before its own", "unset LD_PRELOAD"),
    ),
    "LD_LIBRARY_PATH": (
        re.compile(".*(cuda|cudnn|nccl).*", re.IGNORECASE),
        _note(
            "warning",
            "torch brings its own CUDA libraries, and those of this folder are taken in their place",
            "unset LD_LIBRARY_PATH",
        ),
    ),
    "PYTHONHOME": (re.compile(".+"), _note("warning", "Python takes another one's library", "unset PYTHONHOME")),
    "RANK": (
        re.compile(".+"),
        _note(
            "warning", "volseg takes itself for one process of a job, and waits for the others", "unset RANK WORLD_SIZE"
        ),
    ),
}
"""Variables, the values that matter, and what they do."""


def check_variables(facts: Facts) -> list[MachineFinding]:
    """Say which variables of the environment change what torch, CUDA and NCCL do."""
    variables = facts.python.variables if facts.python is not None else {}
    findings = []
    for name, value in variables.items():
        if name not in BY_VALUE:
            continue
        pattern, (level, why, remedy) = BY_VALUE[name]
        if pattern.fullmatch(value):
            found = f"{name}={value}"
            findings.append(MachineFinding(check="variables", level=level, found=found, why=why, remedy=remedy))
    others = [name for name in variables if name.startswith(("NCCL_", "PYTORCH_", "CUDA_", "VOLSEG_", "OMP_"))]
    quiet = [name for name in others if not any(finding.found.startswith(f"{name}=") for finding in findings)]
    return findings + ([ok("variables", ", ".join(f"{name}={variables[name]}" for name in quiet))] if quiet else [])
