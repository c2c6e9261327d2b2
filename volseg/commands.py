"""Spell the commands that start volseg: those that it runs itself, and those that it prints for the user.

If ``make`` or a full path started volseg, the command is usually not on the shell's path. Printed commands are spelled
as this process was started, or in another way that starts the same installation.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from shlex import quote

MODULES = {"volseg": "volseg", "tensorboard": "tensorboard.main"}
"""Module that ``python -m`` runs for each command."""


def spell(line: str) -> str:
    """Return a command line that the user can type here: unchanged, with a full path, or as ``python -m``.

    Parameters
    ----------
    line : str
        Command that begins with ``volseg`` or ``tensorboard``; the other words are already quoted for a shell.

    Examples
    --------
    >>> spell("volseg predict 'my run' image.nii").endswith("predict 'my run' image.nii")
    True
    """
    tool, blank, rest = line.partition(" ")
    return f"{_find(tool)}{blank}{rest}"


def run_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new Python process; volseg starts all its processes this way.

    The process does not import from the working folder: a ``torch.py`` there is not torch.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def _find(tool: str) -> str:
    started = Path(sys.argv[0])
    if started.name == "__main__.py":  # python -m volseg
        return _as_module(tool)
    folder = started.parent if started.stem == "volseg" else Path(sysconfig.get_path("scripts"))
    script = folder / tool
    if not script.is_file():
        return _as_module(tool)
    on_path = shutil.which(tool)
    if on_path is not None and os.path.samefile(on_path, script):
        return tool
    return quote(show_path(script))


def _as_module(tool: str) -> str:
    """Return the command by which this interpreter runs a module."""
    on_path = shutil.which("python")
    is_found = on_path is not None and Path(on_path).absolute() == Path(sys.executable).absolute()
    return f"{'python' if is_found else quote(show_path(Path(sys.executable)))} -m {MODULES[tool]}"


def show_path(path: Path) -> str:
    """Return a path, relative to the working folder if it is below it."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
