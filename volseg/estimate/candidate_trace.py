"""Trace a candidate without a GPU, through the strategy that would run it.

The strategies' own code runs: slabs and halos, stages and micro-batches, sums of gradients. Of several processes, only
the one that needs most is traced (``single_rank``), or two that differ; of one process with several GPUs, all GPUs are
traced.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.fake_gpu import GpuLike
from volseg.device.gpus import host_values, observer
from volseg.device.torch_internals import tree_leaves
from volseg.errors import NotRecordedError, ParallelError
from volseg.estimate.candidate import Batch, Candidate, Work
from volseg.estimate.fake_step.single_rank import be_process
from volseg.estimate.fake_step.tracing import TracedStep, tracing
from volseg.estimate.gpu_kinds import GpuKind
from volseg.estimate.operator_work import list_tensors
from volseg.estimate.trace import KernelRun, StepTrace
from volseg.parallel.batches import from_slab, slab_shape
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.fast_kernels import FastKernels
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.pipeline import Pipeline
from volseg.parallel.recorded_step import RecordedStep
from volseg.parallel.replicas import Mesh, join_mesh
from volseg.parallel.spatial import ShardedVolume, Spatial

NUM_STEPS = 2
"""Number of eager steps: the first creates the optimizer's state and the mailboxes, the second reuses them."""

TimeKernel = Callable[[KernelRun], float]


def trace_candidate(
    work: Work,
    candidate: Candidate,
    gpu: GpuLike,
    *,
    time_kernel: TimeKernel | None = None,
    one_process: bool = False,
    limit: int | None = None,
) -> tuple[StepTrace, ...]:
    """Return the trace of each GPU of a candidate, or of each GPU that differs from the others.

    Parameters
    ----------
    work : Work
        The step.
    candidate : Candidate
        How to share and run the step.
    gpu : GpuKind
        The kind of GPU.
    time_kernel : callable, optional
        Returns the seconds of a kernel, by which a pipeline is cut. By default, pipelines use those of ``gpu``.
    one_process : bool
        Whether one process drives the GPUs of all slabs; else each slab has its own process.
    limit : int, optional
        Bytes of live tensors on a GPU above which the trace stops; see ``tracing``.

    Raises
    ------
    OutOfMemoryError
        If a GPU would hold more than the limit.
    VolsegError
        If the strategy refuses the network or the batch; the message is the strategy's.
    """
    if candidate.data > work.batch_size:
        raise ParallelError(
            f"{candidate.data} replicas share a batch of {work.batch_size}; take a batch of {candidate.data} samples "
            "or more, or fewer replicas"
        )
    if candidate.spatial > 1 and candidate.pipeline > 1:
        raise ParallelError(
            f"volumes in {candidate.spatial} slabs and a network in {candidate.pipeline} stages: a model is cut in one "
            "way; leave out one of them"
        )
    follow = partial(tracing, gpu, limit=limit)
    if time_kernel is None and candidate.pipeline > 1:
        time_kernel = gpu.seconds if isinstance(gpu, GpuKind) else _time_roughly
    if (candidate.pipeline > 1 or one_process) and candidate.data > 1 and candidate.recorded:
        raise NotRecordedError("stages whose gradients replicas sum by hooks are not recorded")
    if candidate.num_gpus > 1 and candidate.pipeline == 1 and not one_process:
        # The last replica has the most rows, if they differ.
        first, processes = (candidate.data - 1) * candidate.spatial, candidate.num_gpus
        found = []
        for shard in _list_shards(candidate, max(work.sides)):
            (one,) = _follow_process(work, candidate, follow(1, time_kernel), first + shard, processes)
            found.append(replace(one, device=shard))
        return tuple(found)
    num_devices = candidate.num_gpus // candidate.data
    return _follow_process(work, candidate, follow(num_devices, time_kernel), candidate.data - 1, candidate.data)


EVEN = 16
"""Slabs whose planes are a multiple of this stay equal down to a network's coarsest levels."""


def _list_shards(candidate: Candidate, side: int) -> list[int]:
    """Return the ranks of a replica to trace: an inner one and, if planes do not divide evenly, the first."""
    if candidate.spatial < 3:
        return [0]
    return [1] if side % (EVEN * candidate.spatial) == 0 else [0, 1]


def _time_roughly(run: KernelRun) -> float:
    """Return the seconds of a kernel at the peaks of a typical current GPU; only their ratios matter."""
    return max(run.flops / 200e12, run.bytes_moved / 2e12) + 5e-6


def _follow_process(
    work: Work, candidate: Candidate, follow: AbstractContextManager[TracedStep], rank: int, processes: int
) -> tuple[StepTrace, ...]:
    """Return the traces of one of the processes that share the step, with all devices of ``follow``."""
    with follow as followed, ExitStack() as group:
        mesh = None
        if processes > 1:
            note = partial(_note_exchange, followed)
            group.enter_context(be_process(rank, processes, note, followed.devices[0]))
            mesh = join_mesh(candidate.data, processes // candidate.data)
        with host_values():  # some networks read values in construction
            net = work.build()
        model = _place(followed.copy(net), candidate, followed.devices, mesh)
        del net  # its copy is traced
        rows = work.batch_size
        if mesh is not None and candidate.data > 1:
            rows = sum(share.rows.stop - share.rows.start for share in mesh.replicas().shares(rows))
        make_batch = partial(work.make_batch, rows, followed.devices[0])
        if mesh is not None and candidate.spatial > 1:
            make_batch = partial(_make_slabs, work, model, rows, followed.devices[0])
        _run(work, model, make_batch, followed, candidate, is_alone=candidate.num_gpus == processes)
    return followed.traces()


def _note_exchange(followed: TracedStep, kind: str, tensor: Tensor, processes: int) -> None:
    """Record the data that this process sends; each receive is counted where the other process sends."""
    if kind != "receive" and tensor.device in followed.devices:
        followed.on_sent(tensor.device, "halo" if kind == "send" else kind, tensor.nbytes, processes)


def _place(net: nn.Module, candidate: Candidate, devices: list[torch.device], mesh: Mesh | None = None) -> nn.Module:
    """Return the network placed on the candidate's devices."""
    model: nn.Module
    if candidate.pipeline > 1:
        options = Pipeline(split_size=candidate.split_size or "auto", cuts=candidate.cuts, record=candidate.recorded)
        staged = ModelParallel(net.to(devices[0]), strategy=options, devices=devices)
        return staged if mesh is None else DataParallel(staged, mesh.replicas())
    cut = Spatial(checkpoint=candidate.checkpoint)
    if candidate.spatial > 1 and mesh is not None:
        model = ModelParallel(net, strategy=cut, mesh=mesh.spatial_group)
    elif candidate.spatial > 1 or candidate.checkpoint is not None:
        model = ModelParallel(net, strategy=cut, devices=devices)
    else:
        model = FastKernels(net, devices[0]) if candidate.kernels == "fast" else net.to(devices[0])
    return model if mesh is None or candidate.data == 1 else DataParallel(model, mesh.replicas())


def _make_slabs(work: Work, model: nn.Module, rows: int, device: torch.device) -> Batch:
    """Return this process's slabs of a batch, which another process has read and sent."""
    assert isinstance(model, ModelParallel)
    read = work.make_batch(rows, torch.device("cpu"))
    return {
        name: _take_slab(model, field, device) if isinstance(field, Tensor) else field for name, field in read.items()
    }


def _take_slab(model: ModelParallel, field: Tensor, device: torch.device) -> Any:
    if field.ndim not in (4, 5):
        return field.to(device)
    if model.strategy.volumes.dims_of(field.shape) is None:
        raise ParallelError(
            f"volumes of shape {tuple(field.shape)} are too thin to be cut into "
            f"{model.strategy.volumes.communicator.num_shards} slabs; take fewer"
        )
    slab = torch.empty(slab_shape(model, field.shape), dtype=field.dtype, device=device)
    return from_slab(model, slab, field.shape)


def _run(
    work: Work,
    model: nn.Module,
    make_batch: Callable[[], Batch],
    followed: TracedStep,
    candidate: Candidate,
    *,
    is_alone: bool,
) -> None:
    """Train on the same batch, as the training loop does; a pipeline records its stages by itself.

    A step is recorded as a whole if its GPU ``is_alone`` in its process.

    If the first step shows that no step can be recorded, the trace ends there: the recording, two steps later, would be
    refused for the same reason.
    """
    model.train()
    batch = make_batch()
    followed.mark("placed")
    optimizer = work.build_optimizer(model)
    step: Callable[[Batch], Any] = work.build_step(model, optimizer)
    num_steps = NUM_STEPS
    if candidate.recorded and (is_alone or candidate.pipeline > 1):  # one more step records, and another one replays
        num_steps += 2
    if candidate.recorded and is_alone:
        step = RecordedStep(model, step, warm_up=NUM_STEPS, optimizer=optimizer)
    with optimizer.register_step_pre_hook(lambda *_: followed.mark("optimizer")), _marked(model):
        for _ in range(num_steps):
            followed.mark("step")
            result = step(batch)
            del result
            followed.mark("end")
            if isinstance(step, RecordedStep) and (refused := step.refused or step.foresee_refusal()):
                raise NotRecordedError(f"the step would not be recorded: {refused}")
    # A model that several processes share is validated by calls of the leader, which are not traced here.
    if work.validate is not None and not (isinstance(model, ModelParallel) and model.strategy.is_shared):
        # In addition to the training's memory: validation reuses cached memory, but not a recording's.
        followed.mark("validate")
        work.validate(model)


@contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """Mark the beginnings of forward, loss and backward.

    The hooks hold no references, since a recorded step watches everything that the network's hooks could read.
    """
    begins = model.register_forward_pre_hook(lambda *_: observer().on_mark("forward"))
    with begins, model.register_forward_hook(_end_forward):
        yield


def _end_forward(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 (a hook's signature)
    observer().on_mark("loss")
    is_over = False

    def turn(gradient: Tensor) -> None:  # noqa: ARG001 (a hook's signature)
        nonlocal is_over
        if not is_over:
            observer().on_mark("backward")
        is_over = True

    for leaf in tree_leaves(output):
        for tensor in leaf.slabs if isinstance(leaf, ShardedVolume) else list_tensors(leaf):
            if tensor.requires_grad:
                tensor.register_hook(turn)
