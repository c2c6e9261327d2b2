"""State that the operators of one network share: communicator, settings, and parameters on their devices.

Volumes that passed through custom autograd functions are refused here. Such functions leave a mark on the volume's
shell: it claims to need a gradient, so that a ``torch.autograd.Function`` gives its result a history. Autograd does not
see the slabs inside, whose gradient would be lost.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from volseg.device.torch_internals import find_backward_pass, find_saved_tensors_hooks, without_subclass_overrides
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.transport.communicator import Communicator, SlabsOfReplicas
from volseg.parallel.spatial.transport.shared_parameters import Copies, copy_plain

if TYPE_CHECKING:
    from volseg.parallel.replicas import Replicas
    from volseg.parallel.spatial.volume import ShardedVolume


MOST_PLANS = 4096
"""Number of cached plans: enough for a network with some hundred sizes of volumes."""


def saved_tensors_hooks() -> Any:
    """Return the active hooks for autograd's saved tensors (a checkpointed block has its own), or None.

    torch has no public function for this.
    """
    return find_saved_tensors_hooks(True)


def active_autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Return autocast's current dtype for a tensor's kind of device; None without autocast."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class Context:
    """State of one sharded network.

    Parameters
    ----------
    communicator
        The shards.
    on_unsupported
        Whether an operator without a sharded form raises, or runs on gathered tensors.
    net
        The network, for the names of modules in messages.

    Attributes
    ----------
    room
        Planes of room that norms and joins leave around their slabs.
    channels_last
        Whether the network's volumes should be in channels-last layout.
    frugal
        Whether memory matters more than time: True if blocks are recomputed.
    tiled
        Whether convolutions of large slabs write their inputs a tile at a time.
    graph_generators
        A random generator for each slab of this process, while a CUDA graph is recorded; None if all slabs draw from
        the device's generator.
    has_replicas
        Whether gradients are averaged or summed with processes that train on other volumes.
    replicas
        Replicas that share a batch with this one, for norms over the batch; None if each batch is whole here.
    over_replicas
        The slabs of these replicas and of this one; None for a whole batch.
    copies
        Copies of the parameters on the shards' devices for the current pass, if any.
    hooks
        The saved-tensor hooks around the pass, or around a block that is recomputed for ``checkpoint=``. Other hooks
        belong to a checkpoint in the network's own code.
    large_rows
        Layout of large ordinary tensors that were cut along a dim of so many entries, such as masks of windows: later
        ones are computed by the shards that own the entries (see ``operators.operands``).
    """

    def __init__(
        self,
        communicator: Communicator,
        on_unsupported: Literal["raise", "gather"] = "raise",
        net: nn.Module | None = None,
    ) -> None:
        self.communicator = communicator
        self.on_unsupported = on_unsupported
        self.net = net
        self.room = 0
        self.channels_last = False
        self.frugal = False
        self.tiled = False
        self.graph_generators: list[torch.Generator] | None = None
        self.has_replicas = False
        self.replicas: Replicas | None = None
        self.over_replicas: SlabsOfReplicas | None = None
        self._norms: Callable[[Replicas], AbstractContextManager[Any]] = nullcontext
        self.copies: Copies | None = None
        self.hooks: Any = None
        self.large_rows: dict[int, Merged | None] = {}
        # Not a WeakSet: it compares its members, and comparing volumes is an operator.
        self._waiting: list[weakref.ref[Any]] = []
        self._said: set[str] = set()
        self._plans: dict[Hashable, Any] = {}
        self._alone = communicator.devices[0] if len(communicator.devices) == 1 else None

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass runs, or a recomputed part of one."""
        return self.copies is not None

    @property
    def in_network(self) -> bool:
        """Whether the current computation belongs to the network, which has only first derivatives, and not to a loss.

        A block that the network itself checkpoints is recomputed in the backward pass, outside of any forward pass, in
        the same way as at first: every checkpoint, also one of a loss, counts as the network.
        """
        return self.in_pass or saved_tensors_hooks() is not None

    @contextmanager
    def forward_pass(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Run a forward pass with these parameters: each is copied, and its gradient summed, once."""
        with self.using(Copies(self.communicator, parameters)), self.own_hooks():
            yield

    @contextmanager
    def _with(self, **values: Any) -> Iterator[None]:
        """Set attributes within this block."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def using(self, copies: Copies) -> AbstractContextManager[None]:
        """Run a pass, or a part of one again, with these copies of parameters, which are not used afterwards."""
        return self._with(copies=copies)

    @contextmanager
    def own_hooks(self) -> Iterator[None]:
        """Treat the current saved-tensor hooks as those of a pass, or of a recomputed block of it.

        Within this block, norms of ordinary tensors share their statistics with the other replicas.
        """
        norms = nullcontext() if self.replicas is None else self._norms(self.replicas)
        with self._with(hooks=saved_tensors_hooks()), norms:
            yield

    def share_batches(self, replicas: "Replicas", norms: Callable[["Replicas"], AbstractContextManager[Any]]) -> None:
        """Share the statistics of batch norms with other replicas from now on.

        Parameters
        ----------
        replicas
            All replicas of the network.
        norms
            Returns the context in which norms of ordinary tensors share their statistics.
        """
        self.replicas, self.over_replicas = replicas, SlabsOfReplicas(self.communicator, replicas)
        self._norms = norms

    def without_replicas(self) -> AbstractContextManager[None]:
        """Compute the statistics of norms only over this replica's samples within this block."""
        return self._with(replicas=None)

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Return a whole value for each shard; for a parameter, its copies."""
        found = None if self.copies is None else self.copies.find(whole)
        if found is not None:
            return found
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return [whole] if self._alone == whole.device else copy_plain(self.communicator, whole)
        # In a backward pass a block is recomputed; no gradients of its parameters are needed then.
        if self.has_replicas and isinstance(whole, nn.Parameter) and find_backward_pass() == -1:
            raise ParallelError(
                f"a parameter of shape {tuple(whole.shape)} was used with a sharded volume outside the forward pass "
                "that averages its gradient over the replicas of the mesh (a head was called by itself, or the "
                "parameter was frozen when the pass began); use it in the forward of the network of ModelParallel"
            )
        return self.communicator.spread(whole)

    def cast(self, copy: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter's copy in autocast's dtype: converted once per forward pass, however often it is used."""
        if copy.dtype == dtype:
            return copy
        return copy.to(dtype) if self.copies is None else self.copies.cast(copy, dtype)

    def spread_for(
        self, like: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[torch.dtype, list[Tensor], list[Tensor]]:
        """Return the type in which a layer of a volume or slab computes, and its parameters' copies in it."""
        weights = self.spread(weight)
        biases = [] if bias is None else self.spread(bias)
        dtype = active_autocast_dtype(like)
        if dtype is None or not like.dtype.is_floating_point or like.dtype == torch.float64:
            return like.dtype, weights, biases  # torch refuses parameters of another dtype
        return dtype, [self.cast(copy, dtype) for copy in weights], [self.cast(copy, dtype) for copy in biases]

    def planned(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``, which depends only on ``key`` and the communicator, as it was the first time."""
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = make()
        return self._plans[key]

    def defer(self, volume: Any) -> None:
        """Remember a volume whose slabs wait for the next operator."""
        self._waiting = [waiting for waiting in self._waiting if waiting() is not None]
        self._waiting.append(weakref.ref(volume))

    def change(self, volume: Any) -> None:
        """Count an in-place change of a volume, as torch does; write the waiting volumes before.

        Parameters
        ----------
        volume
            The changed volume.
        """
        increment_version(volume)
        for other in self._take_waiting():
            other.pending.settle_apart(other)

    def write_waiting(self) -> None:
        """Write the waiting volumes before a tensor that they depend on loses its history."""
        for other in self._take_waiting():
            other.settle()

    def _take_waiting(self) -> list[Any]:
        waiting, self._waiting = self._waiting, []
        return [volume for reference in waiting if (volume := reference()) is not None]

    def say_once(self, message: str) -> None:
        """Log a warning once about work that was done in another way than requested."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=4)

    def name_of(self, wanted: nn.Module) -> str:
        """Return the name of a module of the network; called only for messages."""
        modules = self.net.named_modules() if self.net is not None else ()
        return next((f"{name} ({type(m).__name__})" for name, m in modules if m is wanted), type(wanted).__name__)

    def module_path(self) -> str:
        """Return the name of the module whose ``forward`` runs, from the call stack; called only for messages."""
        if self.net is None:
            return "the calling code"
        names = {id(module): name or type(module).__name__ for name, module in self.net.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and id(caller) in names:
                return f"{names[id(caller)]} ({type(caller).__name__})"
            frame = frame.f_back  # type: ignore[assignment]
        return "the calling code"


HISTORY: Any = Tensor.grad_fn
"""The property itself, for the shell: ``volume.grad_fn`` would go through the table."""


def check_history(volume: "ShardedVolume") -> None:
    """Refuse a volume from a custom function, before its slabs are read without the table."""
    with without_subclass_overrides():
        if HISTORY.__get__(volume) is not None:
            refuse_custom(volume)


def refuse_custom(volume: "ShardedVolume") -> NoReturn:
    """Raise for a volume that a custom autograd function has marked."""
    node = HISTORY.__get__(volume)
    raise UnsupportedOperatorError(
        f"{volume.context.module_path()} passed a sharded volume through a custom autograd.Function ({node}), whose "
        "backward does not see the slabs. Declare a pointwise function by volseg.parallel.pointwise_function(...), or "
        "write it with torch functions. For torch.utils.checkpoint pass use_reentrant=False. Replace a full backward "
        "hook by a forward hook that calls output.register_hook(...). Otherwise use strategy='pipeline'"
    )
