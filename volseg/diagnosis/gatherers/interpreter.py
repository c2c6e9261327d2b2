"""The interpreter and its environment."""

import locale
import multiprocessing
import os
import platform
import sys
from pathlib import Path

from volseg.diagnosis.facts import PythonFacts

__all__ = ["PREFIXES", "gather", "is_in_container"]

PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
    "VOLSEG_",
)
NAMES = ("CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONPATH", "RANK", "WORLD_SIZE")
"""Variables that change what torch and what it starts do; no others are written down, which may hold secrets."""


def gather() -> PythonFacts:
    """Return what this interpreter is."""
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
    """Tell whether this is a container of Docker or Podman."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
