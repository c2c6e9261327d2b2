"""What was really tried: copies between GPUs, a sum over processes, a kernel that was compiled."""

from volseg.diagnosis.facts import Facts, Peer
from volseg.diagnosis.findings import Level, MachineFinding, ok

__all__ = ["check_all_reduce", "check_compiler", "check_links"]

FAST_KERNELS = (8, 0)
"""Compute capability from which on volseg's own kernels are chosen."""

SLOW_LINK = 5.0
"""GB/s. PCIe of generation 3 copies 12, NVLink from 40 on; what is below goes over main memory or a narrow slot."""


def check_links(facts: Facts) -> list[MachineFinding]:
    """Say what passes between GPUs; pairs of which the same is true are told of together."""
    peers = facts.links.peers if facts.links is not None else ()
    if not peers:
        return []
    if wrong := [peer for peer in peers if peer.is_right is False]:
        return [
            MachineFinding(
                check="links",
                level="error",
                found=f"values do not arrive: {_name_pairs(wrong)}",
                why="several GPUs would train on broken numbers, silently",
                remedy="export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware",
            )
        ]
    without = [peer for peer in peers if not peer.has_access]
    slow = [peer for peer in peers if peer.gb_per_s is not None and peer.gb_per_s < SLOW_LINK]
    speeds = sorted(peer.gb_per_s for peer in peers if peer.gb_per_s is not None)
    links = ", ".join(sorted({peer.link for peer in peers if peer.link}))
    told = f"{len(peers)} pairs of GPUs" + (f" over {links}" if links else "")
    told += f", {speeds[0]:.0f} to {speeds[-1]:.0f} GB/s" if speeds else ""
    if without or slow:
        pairs = _name_pairs(without or slow)
        return [
            MachineFinding(
                check="links",
                level="note" if without and not slow else "warning",
                found=f"{told}; {'no peer access' if without else 'slow'}: {pairs}",
                why="cut volumes and pipelines copy at every layer; replicas (parallel.data) need little of it",
                remedy="volseg train CONFIG --set parallel.data=N, or GPUs that NVLink joins (nvidia-smi topo -m)",
            )
        ]
    return [ok("links", told + ", each reads the other's memory")]


def _name_pairs(peers: list[Peer]) -> str:
    named = [f"{peer.source} to {peer.target}" for peer in peers]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")


def check_all_reduce(facts: Facts) -> list[MachineFinding]:
    """Say whether processes can add up."""
    tried = facts.all_reduce
    if tried is None:
        return []
    rate = tried.size_bytes / 1e9 / max(tried.seconds, 1e-9)
    told = f"{tried.processes} processes add up {tried.size_bytes >> 20} MiB by {tried.backend}, {rate:.3g} GB/s"
    if tried.is_right:
        return [ok("all_reduce", told)]
    return [
        MachineFinding(
            check="all_reduce",
            level="error",
            found=f"{told}, to wrong sums",
            why="several GPUs would train on broken numbers, silently",
            remedy="export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware",
        )
    ]


def check_compiler(facts: Facts) -> list[MachineFinding]:
    """Say whether Triton can compile kernels, and what it lacks."""
    tried, gpus = facts.compiler, facts.torch.gpus if facts.torch is not None else ()
    if tried is None:
        return []
    takes_fast = any(gpu.capability >= FAST_KERNELS for gpu in gpus)
    if not gpus:
        if tried.refused is None:
            return [ok("triton", f"{tried.compiler} builds modules for this Python; no GPU to run a kernel on")]
        why = "nothing here needs it; on a GPU the fast kernels would"
        remedy = _mend_compiler(tried.refused)
        return [MachineFinding(check="triton", level="note", found=tried.refused, why=why, remedy=remedy)]
    if tried.triton is None:
        why = "the fast kernels are written in it; torch's are taken in their place"
        found, remedy = "Triton is not installed", "pip install triton   (CUDA builds of torch bring it)"
        level: Level = "warning" if takes_fast else "note"
        return [MachineFinding(check="triton", level=level, found=found, why=why, remedy=remedy)]
    if tried.kernel == "right":
        return [ok("triton", f"Triton {tried.triton} compiled a kernel and ran it, {tried.seconds or 0:.1f} s")]
    said = tried.kernel_refused or f"a kernel gave {tried.kernel} values"
    cause = tried.refused if tried.refused is not None else said
    return [
        MachineFinding(
            check="triton",
            level="error" if takes_fast else "warning",
            found=f"Triton {tried.triton}: {said}" + (f" ({tried.refused})" if tried.refused else ""),
            why="training.kernels: auto takes fast kernels, which Triton compiles when they are first used",
            remedy=_mend_compiler(cause),
        )
    ]


def _mend_compiler(said: str) -> str:
    """Return what to do about what a compiler said; the usual causes are its absence and that of Python's headers."""
    if "Python.h" in said:
        return "sudo apt-get install python3-dev   (python3.12-dev and so on; dnf install python3-devel)"
    if "no C compiler" in said or "No such file" in said or "C compiler" in said or "not found" in said:
        return "sudo apt-get install gcc libc6-dev   (dnf install gcc), or export CC=COMPILER"
    return "volseg train CONFIG --set training.kernels=torch; rm -rf ~/.triton/cache where it holds another machine's"
