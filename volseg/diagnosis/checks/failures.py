"""What a gatherer that failed, or gave no answer, means."""

from dataclasses import dataclass

from volseg.diagnosis.facts import Facts, NotGathered
from volseg.diagnosis.findings import Level, MachineFinding

__all__ = ["check_failures"]


@dataclass(frozen=True)
class _Meaning:
    level: Level
    why: str
    remedy: str


MEANINGS = {
    "torch": _Meaning(
        "error",
        "nothing can be trained or predicted without torch",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu   "
        "(or cu126, cu128 ... in place of cpu); where it hangs: nvidia-smi, and restart the machine if that hangs too",
    ),
    "driver": _Meaning(
        "warning",
        "a driver that does not answer ends in trainings that hang",
        "nvidia-smi; if that hangs: restart the machine, and look for Xid errors: dmesg | grep -i xid",
    ),
    "all_reduce": _Meaning(
        "error",
        "trainings on several processes cannot add up their gradients",
        "NCCL_DEBUG=INFO volseg doctor; often the shared memory (docker run --ipc=host) or the network interface "
        "(export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo); between GPUs that hang: export NCCL_P2P_DISABLE=1",
    ),
    "links": _Meaning(
        "error",
        "what GPUs send each other does not arrive, so several of them cannot train together",
        "export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware; restart the machine after "
        "Xid errors: dmesg | grep -i xid",
    ),
    "folders": _Meaning(
        "error",
        "a folder that does not answer stops the training that reads or writes there",
        "df -h; export VOLSEG_CACHE=FOLDER on a disk that answers, and volseg train ... --output FOLDER",
    ),
    "packages": _Meaning("warning", "whether the installed packages fit each other is not known", "pip check"),
    "imports": _Meaning(
        "warning", "libraries that read images may fail when they are needed", "python -X importtime -c 'import monai'"
    ),
    "compiler": _Meaning(
        "warning", "the fast kernels may not compile", "volseg train CONFIG --set training.kernels=torch"
    ),
}
"""Of those whose failure says more than that something is unknown."""

UNKNOWN = _Meaning(
    "warning", "nothing is known of what it looks at", "volseg doctor --json > doctor.json, and send it with a report"
)


def check_failures(facts: Facts) -> list[MachineFinding]:
    """Say what could not be found out, and what that means."""
    return [_describe(failure, facts) for failure in facts.failures]


def _describe(failure: NotGathered, facts: Facts) -> MachineFinding:
    meaning = MEANINGS.get(failure.name, UNKNOWN)
    has_gpu = facts.torch is not None and bool(facts.torch.gpus)
    level = "warning" if failure.name == "all_reduce" and not has_gpu else meaning.level
    ended = "ended by its time limit" if failure.timed_out else "failed"
    return MachineFinding(
        check=failure.name,
        level=level,
        found=f"{ended}: {failure.reason}",
        why=meaning.why,
        remedy=meaning.remedy,
    )
