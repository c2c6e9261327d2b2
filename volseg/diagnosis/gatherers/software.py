"""Gather Python and its packages, and test imports and the C compiler."""

import locale
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import import_module
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from volseg.diagnosis.facts import CompilerFacts, ImportFacts, PackageFacts, PythonFacts
from volseg.version import installed_version

# The interpreter and its environment.


PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH_", "TRITON_", "VOLSEG_"),
)
NAMES = ("CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONPATH", "RANK", "WORLD_SIZE")
"""Variables that affect torch and its subprocesses; no others are recorded, as they may hold secrets."""


def gather_python() -> PythonFacts:
    """Return the properties of this interpreter."""
    told = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)}
    own = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    return PythonFacts(
        version=platform.python_version(),
        executable=sys.executable,
        in_environment=own or is_in_container(),
        encoding=locale.getpreferredencoding(False),
        locale=locale.setlocale(locale.LC_CTYPE),
        start_method=multiprocessing.get_start_method(),
        variables=dict(sorted(told.items())),
    )


def is_in_container() -> bool:
    """Return whether this is a container of Docker or Podman."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


# Whether the libraries for images can be imported, which their metadata does not show.


LIBRARIES = ("numpy", "scipy.ndimage", "nibabel", "SimpleITK", "isal", "tensorboard", "monai")


def gather_imports(libraries: tuple[str, ...] = LIBRARIES) -> ImportFacts:
    """Import libraries one after the other; compiled ones may lack a file of the system."""
    refused = {}
    for name in libraries:
        try:
            import_module(name)
        except Exception as fault:  # any error of the library is the result
            refused[name] = f"{type(fault).__name__}: {fault}".strip().splitlines()[0]
    return ImportFacts(refused=refused)


# Installed packages, by their metadata: the requirements of volseg and of its dependencies.


def gather_packages() -> PackageFacts:
    """Return versions and conflicts; neither for a checkout, which has no metadata on its requirements."""
    if installed_version("volseg") is None:
        return PackageFacts(versions={}, is_installed=False)
    needed = [Requirement(text) for text in distribution("volseg").requires or ()]
    wanted = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    unmet, reached = list_unmet_requirements("volseg")
    places: dict[str, set[str]] = {}
    for one in distributions():
        if (name := one.metadata["Name"]) is not None:  # None in a broken installation
            places.setdefault(canonicalize_name(name), set()).add(str(one.locate_file("")))
    twice = [
        f"{name} lies in {' and in '.join(sorted(found))}"
        for name, found in sorted(places.items())
        if len(found) > 1 and name in reached
    ]
    return PackageFacts(
        versions={one.name: installed_version(one.name) for one in wanted}, unmet=tuple(unmet), twice=tuple(twice)
    )


def list_unmet_requirements(root: str) -> tuple[list[str], set[str]]:
    """Follow the requirements of a package; return the unmet ones, and all packages reached."""
    unmet: list[str] = []
    waiting: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for requirement in _list_requirements(distribution(name), extras):
            installed = installed_version(requirement.name)
            if installed is None:
                unmet.append(f"{name} needs {requirement.name}{requirement.specifier}, which is not installed")
            elif not requirement.specifier.contains(installed, prereleases=True):
                unmet.append(f"{name} needs {requirement.name}{requirement.specifier}, installed is {installed}")
            if installed is not None:
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return unmet, {name for name, _ in seen}


def _list_requirements(package: Distribution, extras: frozenset[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in package.requires or ()]
    return [
        one
        for one in requirements
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


# Whether Triton can compile: the C compiler and Python's headers for its launcher, and a kernel.


SOURCE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tried", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tried(void) { return PyModule_Create(&module); }
"""


def gather_compiler() -> CompilerFacts:
    """Build a C module, as Triton does for every kernel, and run a kernel if there is a GPU."""
    compiler, headers = find_compiler(), sysconfig.get_paths()["include"]
    refused = build_module(compiler, headers) if compiler else "there is no C compiler"
    triton = installed_version("triton")
    kernel: Literal["right", "wrong", "not run"] = "not run"
    kernel_refused, seconds = None, None
    if triton is not None:
        from volseg.diagnosis.gatherers.tried_kernel import has_gpu, run_tried_kernel  # seconds of importing torch

        if has_gpu():
            begun = time.perf_counter()
            try:
                kernel = "right" if run_tried_kernel() else "wrong"
            except Exception as fault:  # any error of Triton, compiler or driver is the result
                kernel_refused = f"{type(fault).__name__}: {fault}".strip().splitlines()[0]
            seconds = time.perf_counter() - begun
    return CompilerFacts(
        compiler=compiler,
        headers=headers,
        refused=refused,
        triton=triton,
        kernel=kernel,
        kernel_refused=kernel_refused,
        seconds=seconds,
    )


def find_compiler() -> str | None:
    """Return the C compiler that Triton would use; None if there is none."""
    named = os.environ.get("CC")
    return named or next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)


def build_module(compiler: str, headers: str) -> str | None:
    """Build a C module against Python's headers; return the compiler's message on failure, else None."""
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        source = Path(folder) / "tried.c"
        source.write_text(SOURCE, encoding="utf-8")
        target = str(source.with_suffix(".so"))
        command = [compiler, str(source), "-O3", "-shared", "-fPIC", f"-I{headers}", "-o", target]
        try:
            told = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        except OSError as fault:
            return f"{compiler}: {fault.strerror}"
    if told.returncode == 0:
        return None
    lines = [line for line in (told.stderr + told.stdout).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {told.returncode}")
