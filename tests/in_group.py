"""Cases that run in every process of a group: one test file names them, and looks at what each process found.

``python in_group.py TEST_FILE FOLDER`` in each process runs the file's ``CASES``, functions by name that raise, or
return what is wrong, and writes what it found.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from volseg.errors import ParallelError
from volseg.parallel import launch

Found = list[dict[str, str | None]]
"""Of each process: what is wrong with each case, or None."""


def run_in_group(test_file: str, folder: Path, processes: int = 2) -> Found:
    """Run a test file's cases in so many processes."""
    with contextlib.suppress(ParallelError):  # the failing case's own test shows its traceback
        launch([__file__, test_file, str(folder)], processes)
    files = [folder / f"{rank}.json" for rank in range(processes)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def assert_well(found: Found, name: str) -> None:
    """Fail with what the first process found wrong with the case."""
    for rank, results in enumerate(found):
        assert name in results, f"rank {rank} did not reach {name}: it or another one failed before"
        assert results[name] is None, f"rank {rank}: {results[name]}"


def main(cases: Mapping[str, Callable[[], str | None]], folder: Path) -> None:
    """Run the cases in this process."""
    torch.set_num_threads(1)
    # A rank that fails leaves the others waiting: not for long.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, str | None] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = traceback.format_exc()
            break
        finally:
            (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(runpy.run_path(sys.argv[1])["CASES"], Path(sys.argv[2]))
    # gloo's threads can linger at interpreter exit.
    sys.stdout.flush()
    os._exit(0)
