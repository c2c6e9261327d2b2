"""Recompute the activations of blocks of any network in the backward pass, or keep large ones in host memory.

A block is one level's way down or up, if the network has modules for these (nnU-Net's double convolution, V-Net's
transitions): one volume is kept between two blocks. Blocks of the finest levels hold nearly all memory, so the number
of recomputed levels can be chosen.

The recomputation repeats the first run with its state (buffers, attributes, modes, parameters, the random numbers of
torch, Python and NumPy), and leaves the current state unchanged. It refuses what it cannot repeat: a block that
changes its own input, weights that have changed since, random numbers while a CUDA graph is recorded. Hooks on modules
inside a block run twice.

Offloading is for volumes that fit in no other way: each activation crosses the host's link twice. Recomputation is
faster; try it first.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import log2
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device.gpus import is_recording
from volseg.device.module_internals import BACKWARD_HOOKS, POST_ACCUMULATE_GRAD_HOOKS, ConvNd
from volseg.device.torch_internals import find_backward_pass, tree_flatten, tree_unflatten
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel.spatial.context import Context, saved_tensors_hooks
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.lazy.recipes import RecomputedInput
from volseg.parallel.spatial.pending import build_meta_slabs
from volseg.parallel.spatial.sources import Kept, Unchanged, Watched, keep, take
from volseg.parallel.spatial.transport.pieces import get_halo_room
from volseg.parallel.spatial.volume import ShardedVolume, share_later
from volseg.parallel.state.module import Remembered, remember
from volseg.parallel.state.random import RandomState


def find_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the modules to recompute: a level's way down, or its way up, if the network has modules for them.

    These are the innermost modules with two convolutions or more. The module around one of them replaces it if it adds
    one convolution (a transposed one and the join with the skip, or a strided one). A single convolution elsewhere is
    not recomputed.
    """
    counts = {module: sum(isinstance(child, ConvNd) for child in module.modules()) for module in net.modules()}
    # A list of modules has no forward of its own.
    runnable = [module for module in counts if not isinstance(module, nn.ModuleList | nn.ModuleDict)]

    def inside(module: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
        return [child for child in module.modules() if child in chosen and child is not module]

    found = [
        module
        for module in runnable
        if counts[module] >= 2 and all(counts[child] < 2 for child in module.modules() if child is not module)
    ]
    innermost = set(found)
    for module in runnable:
        inner = inside(module, innermost)
        if module is not net and len(inner) == 1 and counts[module] == counts[inner[0]] + 1 and inner[0] in found:
            found[found.index(inner[0])] = module
    return found


class Recomputation:
    """Recompute the blocks of the ``levels`` finest levels, or of all levels.

    Raises
    ------
    ParallelError
        If ``levels`` is neither None, ``"all"``, ``"tiled"`` nor a positive number.
    """

    def __init__(self, net: nn.Module, levels: str | int | None, context: Context) -> None:
        valid = levels is None or levels in ("all", "tiled") or (isinstance(levels, int) and levels > 0)
        if not valid or isinstance(levels, bool):
            raise ParallelError(f"checkpoint must be None, 'all', 'tiled' or a number of finest levels, got {levels!r}")
        self.levels, self.context = levels, context
        self.blocks = find_blocks(net) if levels is not None else []
        self._random = _DrawnStates()
        # Autograd has a thread for each device, and a block's state is replaced during its recomputation.
        self._lock = RLock()

    def find_drawing(self) -> nn.Module | None:
        """Return a block that has drawn random numbers: its recomputation cannot be recorded."""
        return self._random.find_drawing()

    @contextmanager
    def active(self, finest: int) -> Iterator[None]:
        """Recompute blocks within this context; ``finest`` is the number of voxels of the network's input."""
        if not self.blocks or not torch.is_grad_enabled():
            yield
            return
        patched = {block: vars(block)["forward"] for block in self.blocks if "forward" in vars(block)}
        for block in self.blocks:
            # Set on the instance during one forward pass; the recomputation calls the class's own forward.
            block.forward = partial(self._run, block, block.forward, finest)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward
            for block, forward in patched.items():
                block.forward = forward

    def _run(self, block: nn.Module, forward: Callable, finest: int, *args: Any, **kwargs: Any) -> Any:
        # If the network checkpoints this block itself, its activations are dropped anyway.
        checkpointed = saved_tensors_hooks() != self.context.hooks
        given = volumes((args, kwargs)) if torch.is_grad_enabled() and not checkpointed else []
        # A way up reads the coarse level below and the skip of its own level.
        voxels = max((volume.shape[2:].numel() for volume in given), default=1)
        level = round(log2(max(finest / max(voxels, 1), 1)) / 3)
        if not given or (isinstance(self.levels, int) and level >= self.levels):
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        held = [_HeldTensors(leaf) if isinstance(leaf, ShardedVolume) else leaf for leaf in leaves]
        # Of whole tensors those whose changes torch counts.
        wholes = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, ShardedVolume)]
        plain = Unchanged([leaf for leaf in wholes if not leaf.is_inference()])
        repeat = _Repetition(block, self._random, self.context, self._lock)

        def check(when: str) -> None:
            if not plain.holds() or not all(leaf.unchanged.holds() for leaf in held if isinstance(leaf, _HeldTensors)):
                raise UnsupportedOperatorError(
                    f"the input of the recomputed block {self.context.name_of(block)} was changed in place {when}, so "
                    "the block cannot be recomputed; change it out of place (inplace=False), or leave out checkpoint="
                )

        def run() -> Any:
            if repeat.begun:
                check("after the block ran")
            with repeat.turn() as due:
                if not due:
                    return None
                given = [leaf.take() if isinstance(leaf, _HeldTensors) else leaf for leaf in held]
                taken_args, taken_kwargs = tree_unflatten(given, structure)
                with self.context.own_hooks():
                    result = forward(*taken_args, **taken_kwargs)
                    for volume in volumes((result,)):
                        volume.pending.end_block(volume)
                    return result

        # Without arguments: checkpoint would keep them alive. Random numbers: see ``_Repetition``.
        result = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        check("by the block itself")
        for leaf in held:
            if isinstance(leaf, _HeldTensors) and leaf.recipe is not None:
                leaf.volume, leaf.unchanged = None, Unchanged(())
        return result


class _DrawnStates:
    """Blocks that have drawn random numbers in their runs, by block and modes of its modules."""

    def __init__(self) -> None:
        self._draws: dict[Any, bool] = {}
        self._foreign: set[Any] = set()

    def find_drawing(self) -> nn.Module | None:
        """Return a block that has drawn random numbers in its last run."""
        return next((block for (block, _), drew in self._draws.items() if drew), None)

    def before(self, block: nn.Module, key: Any, context: Context) -> RandomState | None:
        """Record the generators' states before a block runs.

        They cannot be read while a CUDA graph is recorded, and a replay would draw other numbers in the recomputation
        than in the block: then only blocks run that are known to draw none.
        """
        home = context.communicator.home
        if is_recording(home):
            if self._draws.get(key, True):
                raise ParallelError(
                    f"the recomputed block {context.name_of(block)} draws random numbers (or has not run "
                    "yet, so this is unknown), and a CUDA graph cannot repeat them: leave out checkpoint=, or do not "
                    "record the step"
                )
            return None
        return RandomState(context.communicator.devices, foreign=key not in self._draws or key in self._foreign)

    def after(self, key: Any, before: RandomState | None) -> RandomState | None:
        """Return the states from ``before`` if the block has drawn numbers since."""
        if before is None:
            return None
        foreign = before.foreign_moved()
        if foreign:
            self._foreign.add(key)
        drew = self._draws[key] = before.torch_moved() or foreign
        return before if drew else None


class _Repetition:
    """State in which a block ran, for its recomputation."""

    def __init__(self, block: nn.Module, draws: _DrawnStates, context: Context, lock: RLock) -> None:
        self._context, self._lock, self._block = context, lock, block
        self._state: Remembered = remember(block)
        self._copies = context.copies
        self._draws, self._key = draws, (block, self._state.modes)
        self._random = draws.before(block, self._key, context)
        self._done: set[int] = set()
        self.begun = False

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Run the block for the first time, or again in the same state; yield whether the run is due."""
        if not self.begun:
            self.begun = True
            yield True
            self._random = self._draws.after(self._key, self._random)
            return
        with self._lock:
            # Threads of two devices may request one block: the second finds it recomputed.
            task = find_backward_pass()
            due = task == -1 or task not in self._done
            self._done.add(task)
            with ExitStack() as then:
                if due:
                    then.enter_context(_parameters_kept(self._block))
                    then.enter_context(self._state.lent())
                    if self._random is not None:
                        then.enter_context(self._random.lent())
                    if self._copies is not None:
                        then.enter_context(self._context.using(self._copies))
                    then.enter_context(_noticing_changes())
                yield due


@contextmanager
def _noticing_changes() -> Iterator[None]:
    """Refuse in-place changes of saved tensors before the block ends: torch's checkpoint would return these values."""
    pack, unpack = saved_tensors_hooks()
    saved: list[Watched] = []

    def note(tensor: Tensor) -> Any:
        saved.append(Watched(tensor, ends=isinstance(tensor, ShardedVolume)))
        if isinstance(tensor, ShardedVolume):  # saved by a checkpoint in the network's own code
            tensor = share_later(tensor)
            tensor.is_saved = True
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(note, unpack):
        try:
            yield
        finally:
            noted = [*saved]
            saved.clear()  # autograd holds ``note`` until the backward pass
            for watched in noted:
                watched.check()


@contextmanager
def _parameters_kept(block: nn.Module) -> Iterator[None]:
    """Drop hooks that a block's ``forward`` registers again on parameters; restore whether these are frozen.

    A ``forward`` that freezes and unfreezes a parameter may stop in between: unneeded parts are not recomputed.
    """
    trained = [(p, p.requires_grad) for p in block.parameters()]
    registries = BACKWARD_HOOKS, POST_ACCUMULATE_GRAD_HOOKS
    known = [(p, name, set(getattr(p, name) or ())) for p in block.parameters() for name in registries]
    try:
        yield
    finally:
        for parameter, name, before in known:
            hooks = getattr(parameter, name) or {}
            for key in [key for key in hooks if key not in before]:
                del hooks[key]
        for parameter, wanted in trained:
            parameter.requires_grad_(wanted)


class _HeldTensors:
    """A block's input, kept as its recipe once the block has run: half the memory, or none besides kept tensors."""

    def __init__(self, volume: ShardedVolume) -> None:
        self.recipe = volume.pending.hold(volume)
        self.requires_grad = volume.requires_grad
        self.dims, self.shape, self.context = volume.dims, volume.shape, volume.context
        self.volume: ShardedVolume | None = volume
        self.unchanged = Unchanged(list(volume._slabs))
        self._source = Unchanged(() if self.recipe is None else self.recipe.tensors)
        # Shape, layout and room of the slabs, without their memory.
        self._likes = build_meta_slabs(volume)
        self._room = get_halo_room(volume._slabs[0])

    def take(self) -> ShardedVolume:
        """Return the input: itself, or to be written again without history, which the recomputation does not need."""
        if self.volume is not None:
            return self.volume
        assert self.recipe is not None
        waiting = RecomputedInput(self.recipe, self._likes, self._room, self._source, self.requires_grad)
        # Not deferred like a norm: a join that reads its recipe needs no slab, whatever changes in place meanwhile.
        volume = ShardedVolume(waiting.stand_ins, self.dims, self.shape, self.context)
        volume.pending = waiting
        return volume


SMALLEST_BYTES = 2**20
"""Smaller tensors stay where they are: statistics, halos, most parameters."""


@dataclass(frozen=True, slots=True)
class _Away:
    """An activation in host memory, and its original device."""

    host: Tensor
    device: torch.device


@contextmanager
def offloaded() -> Iterator[None]:
    """Move the tensors that autograd saves in this block to the host, and back when they are needed.

    A tensor that two operators save (a norm and the convolution behind it) crosses twice: an address does not
    identify a tensor, since freed memory is reused.
    """

    def pack(tensor: Tensor) -> Kept | _Away:
        # Except a block's input, saved by torch's checkpointing: a volume's slabs are saved one by one.
        stays = isinstance(tensor, ShardedVolume) or tensor.is_leaf
        if stays or tensor.numel() * tensor.element_size() < SMALLEST_BYTES:
            return keep(tensor)
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        return _Away(host, tensor.device)

    def unpack(saved: Kept | _Away) -> Tensor:
        # A copy, even on the CPU: readers must not change the saved tensor.
        return take(saved) if isinstance(saved, Kept) else saved.host.to(saved.device, non_blocking=True, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
