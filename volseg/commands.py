"""The command with which volseg starts each of its processes."""

import sys


def run_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new Python process.

    The process does not import from the working folder: a ``torch.py`` there is not torch.
    """
    return [sys.executable, "-P", "-m", name, *arguments]
