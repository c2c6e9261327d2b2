"""The kernels of a step, one by one, as ``spatial_kernels.py`` reads them."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["profile"]


def profile(run: Any, image: Any, label: Any, path: Path) -> None:
    """Write the kernels of two steps on this rank: start and duration (us), stream, name and grid.

    Parameters
    ----------
    run : callable
        One step.
    image, label
        What it takes.
    path : Path
        A ``.json.gz``.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(image, label)
        run(image, label)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = [
        (round(e["ts"], 1), round(e["dur"], 2), e["args"].get("stream"), e["name"][:90], e["args"].get("grid"))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    path.write_bytes(gzip.compress(json.dumps(sorted(kernels)).encode()))
