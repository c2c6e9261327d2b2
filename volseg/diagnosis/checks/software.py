"""Check Python, packages and environment variables, and report failed gatherers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from volseg.diagnosis.facts import Facts, ImportFacts, NotGathered, PackageFacts, PythonFacts
from volseg.diagnosis.findings import Level, MachineFinding, error, note, ok, warning

# Python, packages and the environment's variables.


def check_python(python: PythonFacts) -> list[MachineFinding]:
    """Report the Python, and whether it is in an environment of its own."""
    told = f"Python {python.version}, {python.executable} (starts processes by {python.start_method})"
    if python.in_environment:
        return [ok("python", told)]
    why = "packages of other projects and of the system get between those of volseg"
    remedy = "python3 -m venv .venv && . .venv/bin/activate && pip install .   (in the checkout)"
    return [note("python", f"{told}, the system's", why, remedy)]


def check_text(python: PythonFacts) -> list[MachineFinding]:
    """Report whether file names may contain any letter."""
    told = f"{python.locale}, {python.encoding}"
    if python.encoding.lower().replace("-", "") == "utf8":
        return [ok("locale", told)]
    why = "volseg's own files are UTF-8 anywhere; names of cases and folders in other letters may be refused"
    return [note("locale", told, why, "export LC_ALL=C.UTF-8")]


def check_packages(packages: PackageFacts) -> list[MachineFinding]:
    """Report the installed versions, and the conflicts between them."""
    if not packages.is_installed:
        found, why = "imported from a checkout, not installed as a package", "whether packages fit it is not known"
        remedy = "pip install -e . in the checkout"
        return [note("packages", found, why, remedy)]
    findings = [
        MachineFinding(
            "packages",
            "error" if sentence.startswith("volseg ") else "warning",
            sentence,
            "it is not known to work, or known not to",
            f"pip install {_quote(sentence)}",
        )
        for sentence in packages.unmet
    ]
    findings += [
        warning(
            "packages.twice",
            sentence,
            "which of the two is imported depends on how Python is started",
            f"pip uninstall {sentence.partition(' ')[0]}, once for each, and install it again",
        )
        for sentence in packages.twice
    ]
    known = ", ".join(f"{name} {version}" for name, version in packages.versions.items() if version)
    return [*findings, *([] if findings else [ok("packages", known)])]


def _quote(sentence: str) -> str:
    """Return the requirement in a sentence such as "a needs b>=2, installed is 1"."""
    needed = sentence.partition(" needs ")[2].partition(", ")
    return (
        f'"{re.split(", (?:installed is|which is not)", sentence.partition(" needs ")[2])[0]}"' if needed else sentence
    )


def check_imports(imports: ImportFacts) -> list[MachineFinding]:
    """Report libraries that cannot be imported."""
    findings = [
        error(
            "imports",
            f"import {name}: {fault}",
            "images could not be read, or networks not built",
            f"pip install --force-reinstall --no-deps {name.partition('.')[0]}",
        )
        for name, fault in imports.refused.items()
    ]
    return findings or [ok("imports", "MONAI, nibabel, SimpleITK, isal and what they need can be imported")]


class HarmfulVariable(NamedTuple):
    """Effect of an environment variable."""

    values: str
    """Pattern of the harmful values, for the whole value."""
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
"""Variables to unset together."""


def check_variables(facts: Facts) -> list[MachineFinding]:
    """Report environment variables that change the behaviour of torch, CUDA and NCCL."""
    variables = facts.python.variables if facts.python is not None else {}
    bad = [name for name, value in variables.items() if name in BY_NAME and re.fullmatch(BY_NAME[name].values, value)]
    findings = [
        MachineFinding(
            "variables",
            BY_NAME[name].level,
            f"{name}={variables[name]}",
            BY_NAME[name].why,
            f"unset {TOGETHER.get(name, name)}",
        )
        for name in bad
    ]
    others = [name for name in variables if name.startswith(("NCCL_", "PYTORCH_", "CUDA_", "VOLSEG_", "OMP_"))]
    quiet = [name for name in others if name not in bad]
    return findings + ([ok("variables", ", ".join(f"{name}={variables[name]}" for name in quiet))] if quiet else [])


# The meaning of a gatherer that failed or did not answer.


@dataclass(frozen=True)
class _Meaning:
    level: Level
    why: str
    remedy: str


MEANINGS = {
    "torch": _Meaning(
        "error",
        "nothing can be trained or predicted without torch",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu   "
        "(or cu126, cu128 ... in place of cpu); where it hangs: nvidia-smi, and restart the machine if that hangs too",
    ),
    "driver": _Meaning(
        "warning",
        "a driver that does not answer ends in trainings that hang",
        "nvidia-smi; if that hangs: restart the machine, and look for Xid errors: dmesg | grep -i xid",
    ),
    "all_reduce": _Meaning(
        "error",
        "trainings on several processes cannot add up their gradients",
        "NCCL_DEBUG=INFO volseg doctor; often the shared memory (docker run --ipc=host) or the network interface "
        "(export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo); between GPUs that hang: export NCCL_P2P_DISABLE=1",
    ),
    "links": _Meaning(
        "error",
        "what GPUs send each other does not arrive, so several of them cannot train together",
        "export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware; restart the machine after "
        "Xid errors: dmesg | grep -i xid",
    ),
    "folders": _Meaning(
        "error",
        "a folder that does not answer stops the training that reads or writes there",
        "df -h; export VOLSEG_CACHE=FOLDER on a disk that answers, and volseg train ... --output FOLDER",
    ),
    "packages": _Meaning("warning", "whether the installed packages fit each other is not known", "pip check"),
    "imports": _Meaning(
        "warning", "libraries that read images may fail when they are needed", "python -X importtime -c 'import monai'"
    ),
    "compiler": _Meaning(
        "warning", "the fast kernels may not compile", "volseg train CONFIG --set training.kernels=torch"
    ),
}
"""Meanings of failures by gatherer; other failures only mean that a section is unknown."""

UNKNOWN = _Meaning(
    "warning", "nothing is known of what it looks at", "volseg doctor --json > doctor.json, and send it with a report"
)


def check_failures(facts: Facts) -> list[MachineFinding]:
    """Report the sections that could not be gathered, and the meaning of each failure."""
    return [_describe(failure, facts) for failure in facts.failures]


def _describe(failure: NotGathered, facts: Facts) -> MachineFinding:
    meaning = MEANINGS.get(failure.name, UNKNOWN)
    has_gpu = facts.torch is not None and bool(facts.torch.gpus)
    level = "warning" if failure.name == "all_reduce" and not has_gpu else meaning.level
    ended = "ended by its time limit" if failure.timed_out else "failed"
    return MachineFinding(failure.name, level, f"{ended}: {failure.reason}", meaning.why, meaning.remedy)
