"""The process that gathers one section of the facts: ``python -m volseg.diagnosis.child NAME [ROLE=FOLDER ...]``.

Its answer alone goes to the standard output; whatever libraries print (NCCL does) goes to the standard error.
"""

import os
import sys
from importlib import import_module

from pydantic import TypeAdapter

__all__ = ["MODULES", "main"]

MODULES = {
    **dict.fromkeys(("python", "packages", "imports", "compiler"), "software"),
    **dict.fromkeys(("system", "folders", "driver"), "machine"),
    **dict.fromkeys(("torch", "links", "all_reduce"), "gpus"),
}
"""Section to the module of `volseg.diagnosis.gatherers` whose ``gather_SECTION`` finds it."""


def main(name: str, *assigned: str) -> None:
    """Gather a section, and write it as JSON."""
    answer = os.dup(1)
    os.dup2(2, 1)
    # By name: only the process that needs torch imports it.
    gather = getattr(import_module(f"volseg.diagnosis.gatherers.{MODULES[name]}"), f"gather_{name}")
    places = dict(one.split("=", 1) for one in assigned)
    section = gather(places) if name == "folders" else gather()
    with os.fdopen(answer, "wb") as output:
        output.write(TypeAdapter(type(section)).dump_json(section))


if __name__ == "__main__":
    main(*sys.argv[1:])
