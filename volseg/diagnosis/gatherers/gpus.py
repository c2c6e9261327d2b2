"""Gather torch's build and GPUs, copies between GPUs, and a sum over processes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from volseg.commands import run_module
from volseg.diagnosis.facts import AllReduceFacts, Gpu, LinkFacts, Peer, TorchFacts

# The build of torch, and the GPUs that it sees.


def gather_torch() -> TorchFacts:
    """Return the build of torch and its GPUs; initialises CUDA."""
    gpus: list[Gpu] = []
    refused = None
    try:
        gpus = [_describe_gpu(index) for index in range(torch.cuda.device_count())]
        if not gpus and torch.version.cuda is not None:
            torch.cuda.init()  # says why there are none
    except RuntimeError as fault:
        refused = str(fault).strip().splitlines()[0]
    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None and gpus else None
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        nccl=".".join(map(str, nccl)) if nccl else None,
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=tuple(gpus),
        refused=refused,
        threads=torch.get_num_threads(),
    )


def _describe_gpu(index: int) -> Gpu:
    told = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=told.name,
        capability=(told.major, told.minor),
        memory_bytes=told.total_memory,
        free_bytes=torch.cuda.mem_get_info(index)[0],
    )


# Copies between GPUs: access to each other's memory, kind of link, speed, and whether the values are right.


COPIED_BYTES = 256 * 2**20
COPIES = 4


def gather_links() -> LinkFacts:
    """Copy between every ordered pair of GPUs."""
    count = torch.cuda.device_count()
    links = read_topology(_ask_topology()) if count > 1 else {}
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    return LinkFacts(peers=tuple(_time_copies(source, target, links.get((source, target))) for source, target in pairs))


def _time_copies(source: int, target: int, link: str | None) -> Peer:
    sent = torch.arange(COPIED_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    came = torch.zeros_like(sent, device=f"cuda:{target}")
    came.copy_(sent)  # the first copy sets up the connection
    is_right = torch.equal(came.cpu(), sent.cpu())
    begun = _wait_for(source, target)
    for _ in range(COPIES):
        came.copy_(sent)
    seconds = _wait_for(source, target) - begun
    return Peer(
        source=source,
        target=target,
        has_access=torch.cuda.can_device_access_peer(target, source),
        link=link,
        gb_per_s=COPIES * COPIED_BYTES / 1e9 / seconds,
        is_right=is_right,
    )


def _wait_for(*gpus: int) -> float:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()


def _ask_topology() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    told = subprocess.run([program, "topo", "-m"], capture_output=True, encoding="utf-8", check=False)  # noqa: S603
    return told.stdout if told.returncode == 0 else ""


def read_topology(text: str) -> dict[tuple[int, int], str]:
    r"""Return the link of each pair of GPUs in the table that ``nvidia-smi topo -m`` prints.

    The table numbers the machine's GPUs; torch's numbers differ if CUDA_VISIBLE_DEVICES is set.

    >>> read_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31")
    {(0, 1): 'NV18', (1, 0): 'NV18'}
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next((line for line in lines if "GPU0" in [cell.strip() for cell in line[1:]]), None)
    if header is None:
        return {}
    columns = {
        index: int(cell.strip()[3:]) for index, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell.strip())
    }
    rows = [line for line in lines if line is not header and re.fullmatch(r"GPU\d+", line[0].strip())]
    return {
        (int(row[0].strip()[3:]), column): row[index].strip()
        for row in rows
        for index, column in columns.items()
        if index < len(row) and row[index].strip() != "X"
    }


# An all-reduce over processes as in a training: one process per GPU by NCCL, or two by gloo without GPUs.
# ``python -m volseg.diagnosis.gatherers.gpus RANK COUNT FILE`` is one process; FILE is the rendezvous.


SIZES_BYTES = {"nccl": 64 * 2**20, "gloo": 2**20}
REPEATS = 5
ANSWER = "volseg-all-reduce"
"""Prefix of the first process's answer."""

LIMIT = timedelta(seconds=90)
"""Time limit of the rendezvous, shorter than the gatherer's."""


def gather_all_reduce() -> AllReduceFacts:
    """Start the processes, and return the measurement of the first.

    Raises
    ------
    RuntimeError
        If a process fails; the message has its last line of output.
    """
    count = torch.cuda.device_count() or 2
    backend = "nccl" if torch.cuda.device_count() else "gloo"
    # A launcher's variables belong to another job; NCCL explains failures only with NCCL_DEBUG.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment.setdefault("NCCL_DEBUG", "WARN")
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        processes = [
            subprocess.Popen(  # noqa: S603 - our own command
                run_module(__spec__.name, str(rank), str(count), str(Path(folder) / "meeting")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
            for rank in range(count)
        ]
        said = [process.communicate()[0] for process in processes]
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(_find_reason(failed))
    # NCCL and torch write to the same stream, before and after the answer.
    seconds, is_right = next(line for line in said[0].splitlines() if line.startswith(ANSWER)).split()[1:]
    return AllReduceFacts(
        backend=backend,
        processes=count,
        size_bytes=SIZES_BYTES[backend],
        seconds=float(seconds),
        is_right=is_right == "True",
    )


def _find_reason(failed: list[str]) -> str:
    """Return NCCL's first warning, if any, and the last line of the first failed process."""
    warned = [line.partition("NCCL WARN ")[2] for text in failed for line in text.splitlines() if "NCCL WARN " in line]
    lines = [line.strip() for line in failed[0].splitlines() if line.strip()]
    return " | ".join([*warned[:1], *lines[-1:]]) or "a process ended without a word"


def _sum_with_others(rank: int, count: int, meeting: str) -> None:
    """Run all-reduces with the other processes; print the seconds, and whether all sums are right."""
    gpus = [rank] if torch.cuda.device_count() else []
    backend = "nccl" if gpus else "gloo"
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=LIMIT)
    values = torch.empty(SIZES_BYTES[backend] // 4, device=device)
    wrong = torch.zeros(1, device=device)
    begun = 0.0
    for repeat in range(REPEATS + 1):
        if repeat == 1:  # the first all-reduce sets up the connections
            begun = _wait_for(*gpus)
        values.fill_(rank + 1.0)
        dist.all_reduce(values)
        wrong += (values != count * (count + 1) / 2).any()
    seconds = (_wait_for(*gpus) - begun) / REPEATS
    dist.all_reduce(wrong)
    is_right = not wrong.item()
    dist.destroy_process_group()
    sys.stdout.write(f"\n{ANSWER} {seconds} {is_right}\n")


if __name__ == "__main__":
    _sum_with_others(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
