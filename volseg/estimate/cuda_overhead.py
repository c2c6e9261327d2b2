"""Memory of a GPU that lies beside torch's allocator: the context, loaded kernels, streams, groups of processes.

Read off an H200 (``workflows/benchmarks/plan_accuracy.py``): what the device said was taken, less what torch had
reserved. Torch 2.11, CUDA 13, driver 580; another driver takes some tens of MiB more or less.
"""

from volseg.estimate.trace import Allocate, KernelRun, StepTrace

__all__ = ["find_least_outside", "find_outside"]

MIB = 2**20

CONTEXT = 527 * MIB
"""CUDA's own, when the first tensor is made; four of them are the driver's before any process."""

LIBRARIES = 112 * MIB
"""cuDNN and the kernels that a step loads, within some MiB whatever the network and its kernels."""

MATRICES = 68 * MIB
"""cuBLAS, which the first product of matrices loads. Its workspace is a block of torch's allocator."""

STREAM = 70 * MIB
"""What the first stream beside the default one takes: that of a recording, or of copies between GPUs."""

GROUP = 1250 * MIB
"""NCCL's communicators and the mailboxes of two processes; measured on two GPUs of one host."""

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm"})


def find_outside(trace: StepTrace, processes: int = 1) -> int:
    """Return the bytes that a step takes of its GPU beside torch's allocator.

    Parameters
    ----------
    trace : StepTrace
        Of the step.
    processes : int
        That share volumes or batches.
    """
    multiplies = any(isinstance(event, KernelRun) and event.name in PRODUCTS for event in trace.events)
    streams = any(isinstance(event, KernelRun | Allocate) and event.stream != 0 for event in trace.events)
    alone = processes == 1
    return find_least_outside(processes) + (MATRICES if multiplies else 0) + (STREAM if streams and alone else 0)


def find_least_outside(processes: int = 1) -> int:
    """Return the bytes that any step takes there, whatever it does."""
    return CONTEXT + LIBRARIES + (STREAM + GROUP if processes > 1 else 0)
