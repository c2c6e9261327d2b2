"""``SpatialStrategy``: run a plain network on volumes cut into slabs."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import volseg.parallel.spatial.operators  # noqa: F401  (fills the operator table)
from volseg.device.gpus import get_capability, has_values, is_gpu, is_recording
from volseg.device.module_internals import ConvNd
from volseg.device.torch_internals import as_plain, tree_flatten, tree_map, tree_unflatten
from volseg.errors import ParallelError
from volseg.parallel.devices import count_launched, get_own_device, is_distributed, is_launched, name_devices
from volseg.parallel.gradient_sums import GradientSums, is_trained
from volseg.parallel.processes.group import agree, get_message_group
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.custom_function import no_script
from volseg.parallel.spatial.dispatch import make_ordinary
from volseg.parallel.spatial.memory import Recomputation, offloaded
from volseg.parallel.spatial.operators.operands import OwnRows
from volseg.parallel.spatial.outputs import CutInput, finish_result
from volseg.parallel.spatial.plan.shards import check_axes, choose_dims
from volseg.parallel.spatial.replication import check_alike, replicate
from volseg.parallel.spatial.transport.communicator import Communicator
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards, join
from volseg.parallel.spatial.volume import ShardedVolume, from_whole
from volseg.parallel.state.random import CommonSeeds, mix, seeded

Devices: TypeAlias = Sequence[str | int | torch.device] | None


@dataclass(frozen=True, kw_only=True)
class Spatial:
    """Cut every volume into slabs, one per shard; see ``volseg.parallel.spatial``.

    Attributes
    ----------
    axes : str or sequence of str, optional
        Which of D, H, W each mesh axis cuts, such as ``"D"`` or ``("D", "H")``. By default D, or the longest axis of
        each volume if D leaves a shard fewer than 16 planes.
    grid : sequence of int, optional
        Shards along each of ``axes``; by default one axis holds all.
    on_unsupported : "raise" or "gather"
        Treatment of an operator without a sharded form: refused, or run on whole tensors with one logged warning.
    checkpoint : str or int, optional
        Activations to recompute instead of keep: None, ``"all"``, or the number of finest levels. ``"tiled"`` is
        ``"all"``, and convolutions of large slabs write their inputs a tile at a time.
    channels_last : bool, optional
        Whether volumes are in channels-last layout; by default on GPUs with 16-bit matrix units, where it is faster.
    offload : bool
        Whether activations of a megabyte and more wait in host memory for the backward pass.
    fixed_order : bool
        Whether sums over shards have one order: the same bits with the shards on one device, on several devices, or on
        several processes.

    Raises
    ------
    ParallelError
        If a value is out of range.

    Examples
    --------
    >>> Spatial(axes="D").axes
    ('D',)
    """

    name: ClassVar[str] = "spatial"
    noun: ClassVar[str] = "the spatial split"

    axes: Sequence[str] | str | None = None
    grid: Sequence[int] | None = None
    on_unsupported: Literal["raise", "gather"] = "raise"
    checkpoint: str | int | None = None
    channels_last: bool | None = None
    offload: bool = False
    fixed_order: bool = False

    def __post_init__(self) -> None:
        if self.on_unsupported not in ("raise", "gather"):
            raise ParallelError(f"on_unsupported must be 'raise' or 'gather', got {self.on_unsupported!r}")
        if isinstance(self.axes, str):
            object.__setattr__(self, "axes", (self.axes,))
        for name in ("axes", "grid"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def build(
        self, net: nn.Module, devices: Devices = None, mesh: Any = None, *, replicated: bool = True
    ) -> "SpatialStrategy":
        """Return the strategy for a network on devices or processes; see ``ModelParallel``."""
        return SpatialStrategy(net, self, devices, mesh, replicated=replicated)


class SpatialStrategy:
    """A network whose volumes are cut into slabs, one per shard.

    Parameters
    ----------
    net
        The network, moved to the first device.
    options
        See ``Spatial``.
    devices
        Devices of this process, one shard each.
    mesh
        Processes instead of devices; see ``ModelParallel``.
    replicated
        Whether the network gets the values of the first process; not needed for a copy of a replicated network.
    """

    def __init__(
        self,
        net: nn.Module,
        options: Spatial | None = None,
        devices: Devices = None,
        mesh: Any = None,
        *,
        replicated: bool = True,
    ) -> None:
        self.options = options = options or Spatial()
        self.net = net
        self.communicator, self.replicas = _find_place(devices, mesh, options)
        self.sums: GradientSums | None = None
        self.axes = check_axes(options.axes, self.communicator.grid)
        self.context = Context(self.communicator, options.on_unsupported, net)
        self.context.room = _count_room(net)
        if self.replicas is not None:
            self.sum_gradients(self.replicas, average=True)
        self.recomputation = Recomputation(net, options.checkpoint, self.context)
        self.context.frugal = options.checkpoint is not None
        self.context.tiled = options.checkpoint == "tiled"
        self._checked = False
        self._checked_weights = not self._groups
        # Shards draw equal numbers on several processes, and with a fixed order also on one device.
        self._draws_alike = self.group is not None or options.fixed_order
        shards = [] if self.group is None else [self.group]
        self.seeds = CommonSeeds(shards, self.communicator.home) if self._draws_alike else None
        home, wanted = self.communicator.home, options.channels_last
        # Devices with 16-bit matrix units, for which channels last is faster.
        suits = is_gpu(home) and get_capability(home) >= (8, 0)
        self.context.channels_last = suits if wanted is None else wanted
        net.to(home)
        if self.context.channels_last:
            _put_channels_last(net)
        if replicated:
            replicate(net, self._groups, self.communicator.home)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the volumes among the arguments, and run the network's own ``forward`` on the slabs."""
        if torch.is_inference_mode_enabled():
            # torch does not count in-place changes there, and a deferred norm needs the count to notice late writes.
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        args, kwargs = tree_map(make_ordinary, (args, kwargs))
        if not self._checked_weights:
            self._checked_weights = True
            check_alike(self.net, self._groups, self.communicator.home)
        leaves, structure = tree_flatten((args, kwargs))
        known = {id(leaf): self.cut(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        cut = [known.get(id(leaf), leaf) for leaf in leaves]  # a tensor that is passed twice is one volume
        args, kwargs = tree_unflatten(cut, structure)
        pairs = {id(whole): (whole, made) for whole, made in zip(leaves, cut, strict=True) if whole is not made}
        inputs = [CutInput(whole, made) for whole, made in pairs.values() if isinstance(made, ShardedVolume)]
        trained: list[Tensor] = [parameter for parameter in self.net.parameters() if is_trained(parameter)]
        marked = self.sums.mark(self.net) if self.sums is not None and torch.is_grad_enabled() else None
        stand_ins: AbstractContextManager[None] = nullcontext()
        if marked is not None:
            trained, stand_ins = marked.trained, marked.used(self.net)
        finest = max((leaf.shape[2:].numel() for leaf in cut if isinstance(leaf, ShardedVolume)), default=0)
        away = offloaded() if self.options.offload and torch.is_grad_enabled() else nullcontext()
        copies = self.context.forward_pass(trained)
        again = self.recomputation.active(finest)
        own_rows: AbstractContextManager[Any] = OwnRows(self.context) if self.context.large_rows else nullcontext()
        with self.same_randomness(), away, copies, stand_ins, again, no_script(), own_rows:
            result = self.net(*args, **kwargs)
        for given in inputs:
            given.check()
        return finish_result(result, marked, contiguous=self.context.channels_last)

    @property
    def is_shared(self) -> bool:
        """Whether volumes are spread over several processes, all of which run the network together."""
        return isinstance(self.communicator, ProcessGroupShards)

    @property
    def is_recordable(self) -> bool:
        """Whether a process runs the network on one device, so that a whole step can be one CUDA graph there."""
        return len(set(self.communicator.devices)) == 1

    @property
    def is_replaying(self) -> bool:
        """Whether the strategy replays recordings of its own: no, whole steps are recorded around it."""
        return False

    @property
    def step_devices(self) -> list[torch.device]:
        """Devices of this process that a whole step works on."""
        return self.communicator.devices

    @property
    def volumes(self) -> "SpatialStrategy":
        """The strategy itself, which cuts volumes."""
        return self

    def agree(self, yes: bool) -> bool:
        """Return whether all processes agree that share a volume, then all that average with them: the whole mesh."""
        return agree(yes, self._groups, self.communicator.home)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that share a volume; None if this process holds all of it."""
        return self.communicator.group if isinstance(self.communicator, ProcessGroupShards) else None

    @property
    def group_rank(self) -> int:
        """Number of this process in the group."""
        return self.communicator.rank if isinstance(self.communicator, ProcessGroupShards) else 0

    @property
    def first_process(self) -> int:
        """Global rank of the first process in the group."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def message_group(self) -> dist.ProcessGroup:
        """Return a gloo group of the processes that share a volume; the first call creates it on all of them."""
        assert self.group is not None
        return get_message_group(self.group)

    def prepare_recording(self) -> list[torch.Generator]:
        """Prepare a CUDA graph of a step; return its random generators besides the device's own.

        Whole channels and levels too coarse to cut draw equal numbers on all shards, voxels different ones: a generator
        for each.
        """
        self.context.graph_generators = None
        if not self._draws_alike:
            return []
        self.context.graph_generators = [torch.Generator(device) for device in self.communicator.devices]
        if isinstance(self.communicator, ProcessGroupShards) and self.communicator.plane_mailbox:
            self.communicator.plane_mailbox.settle()
        return self.context.graph_generators

    @contextmanager
    def replaying(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Replay in this block, with a new seed for every step that is equal on all processes."""
        if isinstance(self.communicator, ProcessGroupShards):
            self.communicator.look()
        with self.same_randomness():
            for generator, index in zip(generators, self.communicator.indices, strict=bool(generators)):
                generator.manual_seed(mix(torch.initial_seed(), 1 + index))
            yield

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        """Groups of processes that hold the same network: shards, then replicas, so that one value reaches all."""
        return [group for group in (self.group, self.replicas) if group is not None]

    def cut(self, value: Any) -> Any:
        """Cut a tensor that is a volume, ``(B, C, D, H, W)`` or ``(B, C, H, W)``; leave other values unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, ShardedVolume):
            return value
        value = as_plain(value)
        dims = self.dims_of(value.shape) if value.ndim in (4, 5) else None
        if dims is None:
            return value.to(self.communicator.home)
        self._check_alike(value)
        if len(self.communicator.devices) == 1:
            value = value.to(self.communicator.home)
        return from_whole(value, dims, self.context)

    def _check_alike(self, value: Tensor) -> None:
        """Refuse different volumes on the processes of a group; checked at the first volume."""
        communicator = self.communicator
        if self._checked or not isinstance(communicator, ProcessGroupShards):
            return
        self._checked = True
        numbers = value.detach().to(communicator.home, torch.float64)
        found = communicator.stack(torch.stack([numbers.sum(), numbers.abs().sum()]))
        if not has_values(communicator.home):
            return
        if not bool((found == found[0]).all()):
            raise ParallelError(
                f"the processes of a spatial group passed different volumes of shape {tuple(value.shape)} (their sums "
                f"are {found[:, 0].tolist()}); all must pass the same volume, or use scatter_batch(model, batch) so "
                f"that one process loads, or a mesh with a 'data' dimension for replicas"
            )

    def dims_of(self, shape: torch.Size) -> list[int] | None:
        """Return the dim that each mesh axis cuts, or None for a volume too thin to cut."""
        return choose_dims(shape, self.axes, self.communicator.grid)

    @contextmanager
    def same_randomness(self) -> Iterator[None]:
        """Give all processes of a volume the same random state within the block.

        Levels that are too coarse to cut draw from it, and so does dropout for its seeds, also in a network in
        evaluation. The caller's generators are restored.
        """
        device = self.communicator.home
        if self.seeds is None or is_recording(device):
            yield
            return
        with seeded(self.seeds.draw(self.net.training), dict.fromkeys(self.communicator.devices)):
            yield

    def sum_gradients(
        self, replicas: dist.ProcessGroup, *, average: bool = False, fixed_order: bool = False
    ) -> GradientSums:
        """Sum the gradients of all later passes over processes that hold the same shard of other volumes."""
        if self.sums is not None:
            raise ParallelError(
                "the gradients of this model are already averaged over the 'data' dimension of its mesh; give "
                "ModelParallel only the spatial group (mesh.spatial_group), and DataParallel the replicas"
            )
        communicator = self.communicator
        stream = communicator.shared.stream if isinstance(communicator, ProcessGroupShards) else None
        self.sums = GradientSums(replicas, communicator.home, average=average, fixed_order=fixed_order, stream=stream)
        self.context.has_replicas = True
        return self.sums

    @property
    def partition(self) -> str:
        """Planes of each shard, for a volume of 100 planes."""
        lines = []
        for index, (device, owned) in enumerate(
            zip(self.communicator.devices, self.communicator.owned([100] * len(self.communicator.grid)), strict=True)
        ):
            planes = ", ".join(f"{start}-{stop} %" for start, stop in owned)
            lines.append(f"shard {self.communicator.indices[index]} on {device}: {planes} of the volume")
        return "\n".join(lines)


def _count_room(net: nn.Module) -> int:
    """Return the planes of halo that the network's convolutions need on each side, at most three."""
    kernels = [
        (module.kernel_size[0] - 1) * module.dilation[0] // 2 for module in net.modules() if isinstance(module, ConvNd)
    ]
    return min(max(kernels, default=0), 3)


def _find_place(devices: Devices, mesh: Any, options: Spatial) -> tuple[Communicator, dist.ProcessGroup | None]:
    several = is_distributed() or (is_launched() and count_launched() > 1)
    if mesh is not None or (several and devices is None):
        return join(mesh, options.grid, options.fixed_order)
    own = [get_own_device()] if devices is None and is_launched() else name_devices(devices)
    return LocalDevices(own, options.grid, options.fixed_order), None


def _put_channels_last(net: nn.Module) -> None:
    """Lay out the convolutions' weights with channels last, in place: the optimizer may hold the parameters already."""
    for parameter in net.parameters():
        if parameter.ndim in (4, 5):
            layout = torch.channels_last if parameter.ndim == 4 else torch.channels_last_3d
            parameter.data = parameter.data.contiguous(memory_format=layout)
