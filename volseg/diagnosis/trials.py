"""Gather facts by trying torch, GPUs and processes: run by `volseg.diagnosis.gatherers`."""

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from volseg.diagnosis.gatherers import Section, shorten
from volseg.version import installed_version


def gather_torch() -> Section:
    """Return the build of torch and the GPUs that it sees, or why CUDA refused; initialises CUDA.

    ``cuda`` is null for a CPU build, ``cudnn`` has cuDNN's form (91002 is 9.10.2), ``threads`` counts CPU threads.
    """
    gpus: list[Section] = []
    refused = None
    try:
        for index in range(torch.cuda.device_count()):
            told = torch.cuda.get_device_properties(index)
            capability, memory = (told.major, told.minor), told.total_memory
            gpus.append({"index": index, "name": told.name, "capability": capability, "memory_bytes": memory})
        if not gpus and torch.version.cuda is not None:
            torch.cuda.init()  # its error says why there are no GPUs
    except RuntimeError as fault:
        refused = str(fault).strip().splitlines()[0]
    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None and gpus else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "architectures": torch.cuda.get_arch_list(),
        "gpus": gpus,
        "refused": refused,
        "threads": torch.get_num_threads(),
    }


COPIED_BYTES = 256 * 2**20
COPIES = 4


def gather_links() -> Section:
    """Copy between every ordered pair of GPUs: access to each other's memory, speed, and whether the values arrive."""
    peers: list[Section] = []
    gpus = range(torch.cuda.device_count())
    for source, target in ((one, other) for one in gpus for other in gpus if one != other):
        sent = torch.arange(COPIED_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
        came = torch.zeros_like(sent, device=f"cuda:{target}")
        came.copy_(sent)  # the first copy sets up the connection
        is_right = torch.equal(came.cpu(), sent.cpu())
        begun = _wait_for(source, target)
        for _ in range(COPIES):
            came.copy_(sent)
        seconds = _wait_for(source, target) - begun
        peers.append(
            {
                "source": source,
                "target": target,
                "has_access": torch.cuda.can_device_access_peer(target, source),
                "gb_per_s": COPIES * COPIED_BYTES / 1e9 / seconds,
                "is_right": is_right,
            }
        )
    return {"peers": peers}


def _wait_for(*gpus: int) -> float:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()


SIZES_BYTES = {"nccl": 64 * 2**20, "gloo": 2**20}
REPEATS = 5
LIMIT = timedelta(seconds=90)
"""Time limit of the rendezvous, shorter than the gatherer's."""


def gather_all_reduce() -> Section:
    """All-reduce over processes as in a training: one process per GPU with NCCL, or two with gloo without GPUs."""
    count = torch.cuda.device_count() or 2
    os.environ |= {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", **os.environ}  # NCCL explains failures only with it
    for name in ("RANK", "WORLD_SIZE"):  # of another job's launcher
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        spawn(add_up, (count, folder), nprocs=count)
        answer: Section = json.loads(Path(folder, "answer").read_text(encoding="utf-8"))
    return answer


def add_up(own: int, size: int, folder: str) -> None:
    """All-reduce as process ``own`` of ``size``; process 0 writes time and correctness to ``answer``."""
    gpus = [own] if torch.cuda.device_count() else []
    backend = "nccl" if gpus else "gloo"
    device = torch.device("cuda", own) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=own, world_size=size, timeout=LIMIT)
    values = torch.empty(SIZES_BYTES[backend] // 4, device=device)
    wrong = torch.zeros(1, device=device)
    begun = 0.0
    for repeat in range(REPEATS + 1):
        if repeat == 1:  # the first all-reduce sets up the connections
            begun = _wait_for(*gpus)
        values.fill_(own + 1.0)
        dist.all_reduce(values)
        wrong += (values != size * (size + 1) / 2).any()
    seconds = (_wait_for(*gpus) - begun) / REPEATS
    dist.all_reduce(wrong)
    told: Section = {"backend": backend, "processes": size, "size_bytes": SIZES_BYTES[backend], "seconds": seconds}
    told["is_right"] = not wrong.item()
    dist.destroy_process_group()
    if own == 0:
        Path(folder, "answer").write_text(json.dumps(told), encoding="utf-8")


def gather_compiler() -> Section:
    """Compile one of volseg's kernels and run it, if Triton and a GPU are present; Triton needs a C compiler for it.

    ``kernel`` is right, wrong or not run; ``refused`` is the error of Triton, compiler or driver; ``seconds`` is the
    time to compile the kernel and run it once.
    """
    triton = installed_version("triton")
    kernel, refused, seconds = "not run", None, None
    if triton is not None and torch.cuda.is_available():
        begun = time.perf_counter()
        try:
            kernel = "right" if try_kernel() else "wrong"
        except Exception as fault:  # any error of Triton, compiler or driver is the result
            refused = shorten(fault)
        seconds = time.perf_counter() - begun
    return {"triton": triton, "kernel": kernel, "refused": refused, "seconds": seconds}


def try_kernel(device: str = "cuda") -> bool:
    """Compile one of volseg's kernels with an empty cache, which would hide a broken compiler; compare with torch."""
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        # Both import Triton, which may fail and reads the variable above.
        from volseg.device.norm.activation import Term
        from volseg.device.norm.passes import affine

        x = torch.arange(216.0, device=device).reshape(1, 1, 6, 6, 6)
        scale, shift = torch.full((1, 1), 3.0, device=device), torch.full((1, 1), 4.0, device=device)
        return torch.equal(affine(Term(x, scale=scale, shift=shift)), 3 * x + 4)
