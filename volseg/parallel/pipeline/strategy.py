"""``PipelineStrategy``: the layers of one network over several devices, in one process."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn

from volseg.device.gpus import is_gpu
from volseg.device.torch_internals import accept_gradients_of_other_streams, is_compiled, pytree
from volseg.errors import ParallelError, PartitionError
from volseg.parallel.devices import Devices, name_devices
from volseg.parallel.pipeline.balance import choose_quickest, compute_held_bytes, list_held
from volseg.parallel.pipeline.batch import run_batch, run_untraced
from volseg.parallel.pipeline.batching import Batching
from volseg.parallel.pipeline.costs import measure
from volseg.parallel.pipeline.micro_batch import (
    Call,
    CutBatch,
    compute_split_sizes,
    count_samples,
    get_batch_size,
    mark_batch_candidates,
    split,
)
from volseg.parallel.pipeline.partition import Partition
from volseg.parallel.pipeline.placement import Placement, place
from volseg.parallel.pipeline.recorder import BatchRecorder
from volseg.parallel.pipeline.stages import plan_stages, read_memory_limits
from volseg.parallel.pipeline.trace import Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cut the layers of the network into stages, and let micro-batches flow through them.

    Attributes
    ----------
    split_size : int or "auto"
        Samples per micro-batch; ``"auto"`` measures powers of two and uses the fastest.
    cuts : sequence of str, optional
        First modules of the stages after the first, as dotted paths, instead of measuring.
    record : "auto" or bool
        False runs Python for every micro-batch. True captures a batch as two CUDA graphs over all devices after three
        eager batches, and replays them for batches of the same kind; each kind keeps the activations of one batch
        allocated. ``"auto"`` records on GPUs.
    batched : sequence of int or str, optional
        Positions and names of the arguments with one row per sample; others go whole to each micro-batch. By default
        the one argument that is as long as the batch; name them if there are several.

    Raises
    ------
    ParallelError
        If a value is out of range.

    Examples
    --------
    >>> Pipeline(split_size=2).record
    'auto'
    """

    name: ClassVar[str] = "pipeline"
    noun: ClassVar[str] = "a pipeline"

    split_size: int | Literal["auto"] = "auto"
    cuts: Sequence[str] | None = None
    record: bool | Literal["auto"] = "auto"
    batched: Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        if self.record != "auto" and not isinstance(self.record, bool):
            raise ParallelError(f"record must be 'auto', True or False, got {self.record!r}")
        if self.split_size != "auto" and (not isinstance(self.split_size, int) or self.split_size < 1):
            raise ParallelError(f"split_size is a number of samples (1 or more) or 'auto', got {self.split_size!r}")
        for name in ("cuts", "batched"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def build(
        self,
        net: nn.Module,
        devices: Devices = None,
        mesh: Any = None,
        *,
        replicated: bool = True,  # noqa: ARG002 (one process has one copy)
    ) -> "PipelineStrategy":
        """Return the strategy for a network on devices of this process; see ``ModelParallel``.

        Raises
        ------
        ParallelError
            For a mesh: use `DataParallel` for replicas of a pipeline.
        """
        if mesh is not None:
            raise ParallelError(
                "strategy='pipeline' runs in one process and takes no mesh; for replicas wrap it: "
                "DataParallel(ModelParallel(net, split_size=...), replicas), one process per pipeline"
            )
        return PipelineStrategy(net, self, devices)


class PipelineStrategy:
    """A network as stages, through which batches flow.

    On the first call the network is measured and cut, and its parameters are moved to their devices; they stay there,
    since an optimizer keeps its state beside them. Later batches may have other sizes.

    Parameters
    ----------
    net
        Any module; its own ``forward`` runs.
    options
        See ``Pipeline``.
    devices
        One per stage at most; all visible GPUs by default. Only the first ones are used if the network has fewer
        separable layers or more stages would be slower; ``partition`` reports this.

    Raises
    ------
    ParallelError
        If there are more cuts than devices allow, or a device is missing.

    Notes
    -----
    Batch norm in training normalises each micro-batch with the micro-batch's own statistics, as every pipeline does;
    running statistics are updated once per batch with those of the whole batch (see ``statistics``). Any other
    state that ``forward`` changes is changed once per micro-batch, and forward hooks see micro-batches.
    """

    def __init__(self, net: nn.Module, options: Pipeline | None = None, devices: Devices = None) -> None:
        self.options = options or Pipeline()
        refuse_hidden(net)
        self.net = net
        self.split_size, self.cuts = self.options.split_size, self.options.cuts
        # Host tensors do not keep a device number ("cpu:1").
        self.devices = [each if is_gpu(each) else torch.device(each.type) for each in name_devices(devices)]
        if any(device.type == "cuda" for device in self.devices):
            # Gradients of a recording come from the stream of its replay; autograd waits for that stream.
            accept_gradients_of_other_streams()
        if self.cuts is not None and len(self.cuts) >= len(self.devices):
            raise ParallelError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, but there are {len(self.devices)} devices"
            )
        self._recorder = BatchRecorder(net, self.options.record, self.devices)
        taken = signature(net.forward).parameters.values()
        names = [each.name for each in taken if each.kind <= each.POSITIONAL_OR_KEYWORD]
        self._batching = Batching(self.options.batched, names)
        self.placement: Placement | None = None
        self._partition: Partition | None = None
        self._splits: dict[Any, int] = {}

    seeds: None = None
    """A pipeline draws from the default generators."""
    is_shared = False
    """Whether volumes are spread over several processes: a pipeline runs in one."""
    is_recordable = False
    """Whether a whole step can be one CUDA graph: a pipeline records its batches itself."""

    @property
    def step_devices(self) -> NoReturn:
        """Devices of a whole step.

        Raises
        ------
        ParallelError
            Always: a pipeline records its batches itself.
        """
        raise ParallelError("only a step of strategy='spatial' can be recorded; a pipeline records its batches itself")

    @property
    def volumes(self) -> NoReturn:
        """How volumes are cut.

        Raises
        ------
        ParallelError
            Always: a pipeline cuts none.
        """
        raise ParallelError(
            "only strategy='spatial' cuts volumes and scatters batches; this model is a pipeline, which takes whole "
            "batches"
        )

    @property
    def partition(self) -> Partition:
        """Assignment of layers to devices; available after the first call.

        Raises
        ------
        ParallelError
            Before the first call.
        """
        if self._partition is None:
            raise ParallelError(
                "the network is not cut yet: call the model once, or model.strategy.plan(batch), before reading "
                "its partition"
            )
        return self._partition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's ``forward`` on each micro-batch and join the outputs, on the device of the input."""
        target = self._get_output_device((args, kwargs))
        call = self._bring_to_first_stage((args, kwargs))
        is_batch = self._mark_batch(call)
        placement, split_size = self._prepare(call, is_batch)
        calls, sizes = split(call, split_size, is_batch), compute_split_sizes(count_samples(call, is_batch), split_size)
        # Different sizes show by themselves whether outputs scale with them, and a batch that is not cut needs no test.
        is_open = len(sizes) > 1 and sizes[0] == sizes[-1]
        cut = CutBatch(call, is_batch, calls, sizes, target)
        confirm: Callable[[Any], None] | None = None
        if is_open:
            self._recorder.conditions()
            condition = self._recorder.conditions.form, self.net.training
            runner = partial(run_untraced, self.net, placement, self.devices)
            confirm = self._batching.prove(condition, call, is_batch, sizes[0], runner)
        replay = self._recorder.find(placement, cut)
        if replay is not None:
            return replay(cut.call)
        output = run_batch(self.net, placement, cut)
        if confirm is not None:
            confirm(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # A placement refers to objects by identity, which loading changes; it is measured again.
        return PipelineStrategy, (self.net, self.options, self.devices)

    def _mark_batch(self, call: Call) -> list[bool]:
        """Return which leaves of the call have one row per sample."""
        whole = self.split_size if isinstance(self.split_size, int) else 1
        if self.options.batched is None and get_batch_size(call) <= whole:
            return mark_batch_candidates(call)
        return self._batching.mark_batch_arguments(call)

    @property
    def is_replaying(self) -> bool:
        """Whether a kind of batch is replayed."""
        return self._recorder.num_kept > 0

    def plan(self, *args: Any, **kwargs: Any) -> Partition:
        """Measure, cut and place without running, as a loaded optimizer state needs it beforehand."""
        call = self._bring_to_first_stage((args, kwargs))
        self._prepare(call, self._mark_batch(call))
        return self.partition

    def _prepare(self, call: Call, is_batch: Sequence[bool]) -> tuple[Placement, int]:
        """Return the placement and the split size, measured on the first call of each shape."""
        shapes = tuple(leaf.shape for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor))
        split_size = self._splits.get(shapes)
        if split_size is None or self.placement is None:
            # Parameters that were moved under inference mode could never be trained again.
            with torch.inference_mode(False):
                split_size = self._splits[shapes] = self._decide(call, is_batch)
        assert self.placement is not None
        return self.placement, split_size

    def _decide(self, call: Call, is_batch: Sequence[bool]) -> int:
        """Measure unknown costs; place the network on the first call."""
        refuse_hidden(self.net)
        batch = count_samples(call, is_batch)

        def micro_batch(samples: int) -> Call:
            return split(call, samples, is_batch)[0]

        if self.cuts is not None and self.placement is None:
            samples = min(self.split_size, batch) if isinstance(self.split_size, int) else 1
            self._place(*self._cut_by_hand(micro_batch(samples), samples))
        if isinstance(self.split_size, int):
            if self.placement is None:
                self._place(*self._plan(micro_batch, batch, self.split_size))
            return self.split_size
        sizes = [size for size in (2**power for power in range(batch.bit_length())) if size < batch] + [batch]
        plans = {size: self._plan(micro_batch, batch, size) for size in sizes}
        predicted = {size: partition.batch_ms for size, (partition, _) in plans.items()}
        chosen = choose_quickest(predicted)
        logger.info("split_size='auto': %s ms per batch of %d; using %d", predicted, batch, chosen)
        if self.placement is None:
            self._place(*plans[chosen])
        return chosen

    def _plan(self, micro_batch: Callable[[int], Call], batch: int, split_size: int) -> tuple[Partition, Trace]:
        """Measure a micro-batch and choose a cut."""
        measured = measure(self.net, micro_batch(split_size), self.devices[0])
        sizes = compute_split_sizes(batch, split_size)
        limits, is_recorded = read_memory_limits(self.devices), self._recorder.is_active
        return plan_stages(measured, self.devices, sizes[0], len(sizes), limits, is_recorded), measured.trace

    def _cut_by_hand(self, call: Call, samples: int) -> tuple[Partition, Trace]:
        """Cut at the user's modules; nothing is timed."""
        assert self.cuts is not None
        measured = measure(self.net, call, self.devices[0], is_timed=False)
        layers = measured.layers
        starts = [find_start(cut, [layer.modules[0] for layer in layers]) for cut in self.cuts]
        ends = [0, *starts, len(layers)]
        if sorted(set(ends)) != ends:
            raise PartitionError(
                f"cuts must be in the order of execution and begin after the first layer, got {self.cuts}"
            )
        lengths = [end - start for start, end in pairwise(ends)]
        held = list_held(compute_held_bytes(measured.activations, len(layers), self._recorder.is_active), lengths)
        return Partition.from_lengths(layers, lengths, self.devices, held, samples=samples), measured.trace

    def _place(self, partition: Partition, trace: Trace) -> None:
        """Move the layers to their devices."""
        if partition.notes and len(partition.stages) < len(self.devices):
            logger.warning("%s: %s", type(self.net).__name__, partition.notes[0])
        self.placement = place(self.net, trace, [len(stage.layers) for stage in partition.stages], self.devices)
        self._partition = partition
        logger.info("pipeline of %d stages:\n%s", len(partition.stages), partition)

    def _bring_to_first_stage(self, call: Call) -> Call:
        """Copy tensors that are on none of the devices to the first one."""

        def bring(tensor: Tensor) -> Tensor:
            return tensor if tensor.device in self.devices else tensor.to(self.devices[0], non_blocking=True)

        return pytree.tree_map_only(Tensor, bring, call)

    def _get_output_device(self, call: Call) -> torch.device:
        """Return the device of the first tensor argument, or the first stage's if that is none of the pipeline's."""
        found = next((leaf.device for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)), None)
        return found if found is not None and found in self.devices else self.devices[0]


def refuse_hidden(net: nn.Module) -> None:
    """Refuse modules whose functions cannot be intercepted.

    Raises
    ------
    PartitionError
        If there is such a module.
    """
    for path, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
            where = repr(path) if path else "the network itself"
            raise PartitionError(
                f"the pipeline intercepts the functions of a network, but {where} ({type(module).__name__}) is "
                "scripted or compiled: pass the original module (of torch.compile: its _orig_mod)"
            )


def find_start(cut: str, starts: Sequence[str]) -> int:
    """Return the segment that starts with module ``cut`` or inside it.

    Raises
    ------
    PartitionError
        If no segment starts there; lists the possible starts.
    """
    for number, path in enumerate(starts):
        if path == cut or path.startswith(f"{cut}."):
            return number
    raise PartitionError(
        f"no stage can start at {cut!r}: forward does not call this module, or calls it between the creation and "
        f"an in-place change of a tensor. Stages can start at {', '.join(starts[1:]) or 'no module of this network'}"
    )
