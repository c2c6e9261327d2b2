"""Write the lock files of the image: every distribution by version and SHA-256, as ``pip --require-hashes`` wants them.

``python docker/lock.py [VARIANT...]`` needs ``uv`` (``pip install uv``) and a network with PyPI, and with PyTorch's own
index for ``p3`` and ``cpu``. ``--torch-wheels FOLDER`` takes torch from a folder of wheels instead.

The versions of what volseg itself asks for are those of ``constraints.txt``, so that the image holds what is tested.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "docker" / "locks"

PYTORCH = "https://download.pytorch.org/whl"

TORCH = {
    "p3": ("torch==2.10.0+cu126", f"{PYTORCH}/cu126"),
    "current": ("torch", None),
    "cpu": ("torch==2.13.0+cpu", f"{PYTORCH}/cpu"),
}
"""Torch by variant, and the index that has it where PyPI has not; ``current`` is what constraints.txt names."""

PYTHON = "3.11"
"""Of the image's base, Debian bookworm."""

NOT_CONSTRAINED = re.compile(r"(torch|triton)\b")
"""Not for a V100: it needs another torch than the tests, and each torch asks for a triton of its own."""


def main() -> None:
    """Write the lock files that the command line names, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", choices=[[], *TORCH, "build"], help="default all")
    parser.add_argument("--torch-wheels", type=Path, help="folder with torch's wheel, in place of PyTorch's index")
    arguments = parser.parse_args()
    if shutil.which("uv") is None:
        sys.exit("docker/lock.py needs uv: pip install uv")
    for variant in arguments.variants or [*TORCH, "build"]:
        write_lock(variant, arguments.torch_wheels)


def write_lock(variant: str, torch_wheels: Path | None = None) -> None:
    """Resolve one variant and write its file; ``build`` is what builds the wheel of volseg."""
    if variant == "build":
        compile_lock("hatchling>=1.27\n", "build")
        return
    torch, index = TORCH[variant]
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if variant != "p3" or not NOT_CONSTRAINED.match(line)
    ]
    constraints = LOCKS / ".constraints"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    try:
        source = [] if index is None else ["--find-links", str(torch_wheels)] if torch_wheels else ["--index", index]
        options = ["--constraints", str(constraints), "--index-strategy", "unsafe-best-match", *source]
        compile_lock(f"{project_requirements()}\n{torch}\n", variant, *options)
    finally:
        constraints.unlink()


def project_requirements() -> str:
    """Return what volseg asks for, without torch's range: a local version such as ``+cu126`` is pinned beside it."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return "\n".join(asked)


def compile_lock(requirements: str, name: str, *options: str) -> None:
    """Let ``uv`` resolve and hash; nothing of this machine goes into the file."""
    resolved = subprocess.run(
        [
            *("uv", "pip", "compile", "-", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"),
            *("--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"),
            *options,
        ],
        input=requirements,
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=ROOT,
    )
    if resolved.returncode:
        sys.exit(f"{name}: {resolved.stderr}")
    target = LOCKS / f"{name}.txt"
    target.write_text(f"# Written by docker/lock.py {name}\n{resolved.stdout}", encoding="utf-8")
    print(f"{target.relative_to(ROOT)}: {resolved.stdout.count('==')} distributions")


if __name__ == "__main__":
    main()
