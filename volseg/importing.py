"""Import modules at the first use of their names, and prepare the process for these imports."""

import gc
import os
import pwd
from importlib import import_module
from types import ModuleType


def name_user() -> None:
    """Set the name of a user without an account (``docker run --user``): importing MONAI fails without one."""
    try:
        os.environ.get("USER") or os.environ.get("LOGNAME") or pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ["USER"] = str(os.getuid())


def import_late(name: str) -> ModuleType:
    """Import a module and its dependencies like ``importlib.import_module``, with garbage collection paused.

    A training imports 3400 modules, most of them torch's and MONAI's. The collector would repeatedly scan all of their
    objects and find no garbage: this takes a sixth of the import time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            gc.enable()
