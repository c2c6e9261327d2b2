"""Whether Triton can compile: the C compiler and Python's headers that it builds its starter with, and a kernel."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from volseg.diagnosis.facts import CompilerFacts

__all__ = ["build_module", "find_compiler", "gather"]

MODULE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tried", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tried(void) { return PyModule_Create(&module); }
"""


def gather() -> CompilerFacts:
    """Build a module of C, as Triton does for every kernel, and run a kernel where there is a GPU."""
    compiler, headers = find_compiler(), sysconfig.get_paths()["include"]
    refused = build_module(compiler, headers) if compiler else "there is no C compiler"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    kernel: Literal["right", "wrong", "not run"] = "not run"
    kernel_refused, seconds = None, None
    if triton is not None:
        from volseg.diagnosis.gatherers.tried_kernel import has_gpu, run_tried_kernel  # seconds of importing torch

        if has_gpu():
            begun = time.perf_counter()
            try:
                kernel = "right" if run_tried_kernel() else "wrong"
            except Exception as fault:  # whatever Triton, the compiler and the driver raise is what is asked for
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
    """Return the C compiler, looked for where Triton looks."""
    named = os.environ.get("CC")
    return named or next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)


def build_module(compiler: str, headers: str) -> str | None:
    """Build a module of C against Python's headers; return what the compiler said where it could not."""
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        source = Path(folder) / "tried.c"
        source.write_text(MODULE, encoding="utf-8")
        command = [
            compiler,
            str(source),
            "-O3",
            "-shared",
            "-fPIC",
            f"-I{headers}",
            "-o",
            str(source.with_suffix(".so")),
        ]
        try:
            told = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        except OSError as fault:
            return f"{compiler}: {fault.strerror}"
    if told.returncode == 0:
        return None
    lines = [line for line in (told.stderr + told.stdout).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {told.returncode}")
