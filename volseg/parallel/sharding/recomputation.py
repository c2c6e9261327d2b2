"""Activation checkpointing of the blocks of any network: forget them, and compute them again in the backward pass.

A block is one level's way down or up as far as the network has modules for them (nnU-Net's double convolution, V-Net's
transitions): between two blocks one volume is kept. Blocks of the finest levels hold nearly all memory, so a number of
levels can be chosen.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import log2
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError
from volseg.parallel.sharding.again import Again
from volseg.parallel.sharding.table import volumes
from volseg.parallel.sharding.volume import ShardedVolume

__all__ = ["Recomputation", "blocks"]


def blocks(net: nn.Module) -> list[nn.Module]:
    """Return the modules to recompute: a level's way down, or its way up, where the network has modules for them.

    The innermost modules that hold two convolutions or more; instead of one of them the module around it, where that
    adds one convolution (a transposed one and the join with the skip, or a strided one). A lone convolution elsewhere
    stays as it is.
    """
    counts = {module: sum(isinstance(child, _ConvNd) for child in module.modules()) for module in net.modules()}
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
    """Recompute blocks of ``levels`` finest levels, or of all.

    Raises
    ------
    ParallelError
        If ``levels`` is neither None, ``"all"`` nor a positive number.
    """

    def __init__(self, net: nn.Module, levels: str | int | None) -> None:
        valid = levels is None or levels == "all" or (isinstance(levels, int) and levels > 0)
        if not valid or isinstance(levels, bool):
            raise ParallelError(f"checkpoint must be None, 'all' or a number of finest levels, got {levels!r}")
        self.levels = levels
        self.blocks = blocks(net) if levels is not None else []

    @contextmanager
    def active(self, finest: int) -> Iterator[None]:
        """Recompute within this context; ``finest`` is the number of voxels of the network's input."""
        if not self.blocks:
            yield
            return
        for block in self.blocks:
            # On the instance, for the time of one forward pass; the recomputation calls the class's own forward.
            block.forward = partial(self._run, block, block.forward, finest)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward

    def _run(self, block: nn.Module, forward: Callable, finest: int, *args: Any, **kwargs: Any) -> Any:
        given = volumes((args, kwargs))
        # A way up reads the coarse level below and the skip of its own.
        if not given or not self._chosen(max(volume.shape[2:].numel() for volume in given), finest):
            return forward(*args, **kwargs)
        random = any(isinstance(module, _DropoutNd) and module.p > 0 for module in block.modules())
        leaves, structure = tree_flatten((args, kwargs))
        held = [_Held(leaf) if isinstance(leaf, ShardedVolume) else leaf for leaf in leaves]

        def run() -> Any:
            given = [leaf.take() if isinstance(leaf, _Held) else leaf for leaf in held]
            taken_args, taken_kwargs = tree_unflatten(given, structure)
            return forward(*taken_args, **taken_kwargs)

        # No arguments: checkpoint would keep them as they are.
        result = checkpoint(run, use_reentrant=False, preserve_rng_state=random and block.training)
        for leaf in held:
            if isinstance(leaf, _Held):
                leaf.let_go()
        return result

    def _chosen(self, voxels: int, finest: int) -> bool:
        if self.levels == "all":
            return True
        level = round(log2(max(finest / max(voxels, 1), 1)) / 3)
        return level < self.levels  # type: ignore[operator]


class _Held:
    """A block's input, kept as its recipe once the block has run: half as much, or nothing that is not kept anyway."""

    def __init__(self, volume: ShardedVolume) -> None:
        volume.settle()
        self.recipe, self.room = volume.current_recipe(), volume.room
        self.requires_grad = volume.requires_grad
        self.dims, self.shape, self.context = volume.dims, volume.shape, volume.context
        self.volume: ShardedVolume | None = volume
        self.versions = volume._versions()[1:]
        # Shape and layout of the slab, without its memory.
        slab = volume._slabs[0]
        self.like = torch.empty_strided(slab.shape, slab.stride(), dtype=slab.dtype, device="meta")

    def let_go(self) -> None:
        """Forget the slab where there is a recipe."""
        if self.recipe is not None:
            self.volume = None

    def take(self) -> ShardedVolume:
        """Return the input: itself, or to be computed again without history, which the recomputation does not need."""
        if self.volume is not None:
            return self.volume
        assert self.recipe is not None
        again = Again(self.recipe, self.like, self.room, self.versions, self.requires_grad)
        return ShardedVolume([again.placeholder()], self.dims, self.shape, self.context, again)
