"""Gather what torch, GPUs and processes do when they are tried: run by `volseg.diagnosis.gatherers`."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from volseg.commands import run_module
from volseg.diagnosis.gatherers import Section, shorten
from volseg.version import installed_version


def gather_torch() -> Section:
    """Return the build of torch and the GPUs that it sees, or why CUDA refused; initialises CUDA.

    ``cuda`` is null for a CPU build, ``cudnn`` in cuDNN's form (91002 is 9.10.2), ``threads`` those of the CPU.
    """
    gpus: list[Section] = []
    refused = None
    try:
        for index in range(torch.cuda.device_count()):
            told = torch.cuda.get_device_properties(index)
            free = torch.cuda.mem_get_info(index)[0]
            gpus.append(
                {
                    "index": index,
                    "name": told.name,
                    "capability": (told.major, told.minor),
                    "memory_bytes": told.total_memory,
                    "free_bytes": free,
                }
            )
        if not gpus and torch.version.cuda is not None:
            torch.cuda.init()  # says why there are none
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
    """All-reduce over processes as in a training: one process per GPU by NCCL, or two by gloo without GPUs.

    Raises
    ------
    RuntimeError
        If a process fails; the message has NCCL's first warning, if any, and the last line of the first that failed.
    """
    count = torch.cuda.device_count() or 2
    # A launcher's variables belong to another job; NCCL explains failures only with NCCL_DEBUG.
    environment = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", **os.environ}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        processes = [
            subprocess.Popen(  # noqa: S603 - our own command
                run_module("volseg.diagnosis.gatherers", "sum", str(rank), str(count), str(Path(folder) / "meeting")),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
            for rank in range(count)
        ]
        told = [process.communicate() for process in processes]
    if failed := [said for process, (_, said) in zip(processes, told, strict=True) if process.returncode]:
        warned = re.findall("NCCL WARN (.*)", "\n".join(failed))
        lines = [line.strip() for line in failed[0].splitlines() if line.strip()]
        raise RuntimeError(" | ".join([*warned[:1], *lines[-1:]]) or "a process ended without a word")
    answer: Section = json.loads(told[0][0])
    return answer


def gather_sum(rank: str, count: str, meeting: str) -> Section:
    """All-reduce with the other processes, as one of ``count`` that meet at a file; return time and correctness."""
    own, size = int(rank), int(count)
    gpus = [own] if torch.cuda.device_count() else []
    backend = "nccl" if gpus else "gloo"
    device = torch.device("cuda", own) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=own, world_size=size, timeout=LIMIT)
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
    is_right = not wrong.item()
    dist.destroy_process_group()
    told = {"backend": backend, "processes": size, "size_bytes": SIZES_BYTES[backend]}
    return {**told, "seconds": seconds, "is_right": is_right}


SOURCE = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tried", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tried(void) { return PyModule_Create(&module); }
"""


def gather_compiler() -> Section:
    """Build a C module against Python's headers, as Triton does for every kernel, and run a kernel if there is a GPU.

    ``refused`` is the compiler's message, ``kernel`` one of right, wrong and not run, ``kernel_refused`` the error of
    Triton, compiler or driver, ``seconds`` the time for compiling the kernel and running it once.
    """
    named = os.environ.get("CC")
    compiler = named or next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    headers = sysconfig.get_paths()["include"]
    refused = build_module(compiler, headers) if compiler else "there is no C compiler"
    triton = installed_version("triton")
    kernel, kernel_refused, seconds = "not run", None, None
    if triton is not None and torch.cuda.is_available():
        begun = time.perf_counter()
        try:
            kernel = "right" if try_kernel() else "wrong"
        except Exception as fault:  # any error of Triton, compiler or driver is the result
            kernel_refused = shorten(fault)
        seconds = time.perf_counter() - begun
    told = {"compiler": compiler, "headers": headers, "refused": refused, "triton": triton}
    return {**told, "kernel": kernel, "kernel_refused": kernel_refused, "seconds": seconds}


def build_module(compiler: str, headers: str) -> str | None:
    """Build a C module against Python's headers; return the compiler's message on failure, else None."""
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        source = Path(folder) / "tried.c"
        source.write_text(SOURCE, encoding="utf-8")
        target = str(source.with_suffix(".so"))
        command = [compiler, str(source), "-O3", "-shared", "-fPIC", f"-I{headers}", "-o", target]
        try:
            told = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        except OSError as fault:
            return f"{compiler}: {fault.strerror}"
    if told.returncode == 0:
        return None
    lines = [line for line in (told.stderr + told.stdout).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {told.returncode}")


def try_kernel(device: str = "cuda") -> bool:
    """Compile one of volseg's kernels with an empty cache, which would hide a broken compiler; compare with torch."""
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        # Both import Triton, which may fail, and which reads the variable above.
        from volseg.device.norm.activation import Term
        from volseg.device.norm.passes import affine

        x = torch.arange(216.0, device=device).reshape(1, 1, 6, 6, 6)
        scale, shift = torch.full((1, 1), 3.0, device=device), torch.full((1, 1), 4.0, device=device)
        return torch.equal(affine(Term(x, scale=scale, shift=shift)), 3 * x + 4)
