"""What passes between GPUs: who reads whose memory, over which link, how fast, and whether the values arrive."""

import re
import shutil
import subprocess
import time

import torch

from volseg.diagnosis.facts import LinkFacts, Peer

__all__ = ["gather", "read_topology"]

COPIED_BYTES = 256 * 2**20
COPIES = 4


def gather() -> LinkFacts:
    """Copy between every ordered pair of GPUs."""
    count = torch.cuda.device_count()
    links = read_topology(_ask_topology()) if count > 1 else {}
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    return LinkFacts(peers=tuple(_look_at(source, target, links.get((source, target))) for source, target in pairs))


def _look_at(source: int, target: int, link: str | None) -> Peer:
    sent = torch.arange(COPIED_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    came = torch.zeros_like(sent, device=f"cuda:{target}")
    came.copy_(sent)  # the first one sets the way up
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

    Its numbers are the machine's; they are taken for torch's, which CUDA_VISIBLE_DEVICES may change.

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
