"""A volume cut into slabs that passes through unmodified module code.

``ShardedVolume`` looks like a tensor (``isinstance``, ``shape``, ``dtype``, ``device``) and holds no voxels itself: it
intercepts every torch function above autograd, and the operator table runs that function on the slabs. A function
without a sharded form raises; none runs on the empty shell.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from volseg.device.torch_internals import make_wrapper_subclass, to_copies
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import Context, check_history
from volseg.parallel.spatial.pending import PLAIN, PLAIN_SHOWN, Pending, Shown, Waiting
from volseg.parallel.spatial.plan.shards import Fetch, Merged, Span, spans
from volseg.parallel.spatial.sources import Unchanged
from volseg.parallel.spatial.transport.halo import Halo, Wait

if TYPE_CHECKING:
    from volseg.parallel.spatial.copied_view import Origin


class ShardedVolume(Tensor):
    """Slabs of one volume, cut along ``dims``.

    Attributes
    ----------
    slabs
        The slabs that this process holds: ordinary tensors with ordinary autograd.
    dims
        The tensor dim that each mesh axis cuts.
    context
        Communicator and settings.
    pending
        Whether the slabs are still to be written, or can be written again (see ``pending``).
    merged
        What the cut dim was merged with, if it was, on grids of one axis. Only operators that declare it (see
        ``table.handles``) get such a volume.
    origin
        Set if torch would return a view and these slabs are copies (see ``copied_view``). Such a volume may not be
        written to.
    is_bypassed
        Whether part of the gradient goes past these slabs, to the slabs that they join.
    is_perhaps_given
        Whether torch may have returned the source volume itself, as ``contiguous`` does. The gradient, and a hook for
        it, would then be the source's.
    is_saved
        Whether a checkpoint within a recomputed block saves it. ``requires_grad`` is then False: otherwise torch would
        detach it, and save nothing of what the block does with it.
    widen
        Returns the volume in float32; set if torch would have float32 and these slabs have fewer digits.
    """

    run_function: ClassVar[Callable[[Callable, tuple, dict[str, Any]], Any]]
    """Runs a torch function on the slabs; ``dispatch``, which knows the operators, sets it."""
    dims: tuple[int, ...]
    context: Context
    pending: Pending = PLAIN
    merged: Merged | None = None
    origin: "Origin | None" = None
    is_bypassed: bool = False
    is_perhaps_given: bool = False
    is_saved: bool = False
    widen: "Callable[[ShardedVolume], ShardedVolume] | None" = None
    _slabs: list[Tensor]
    _shape: torch.Size

    @staticmethod
    def __new__(
        cls,
        slabs: Sequence[Tensor],
        dims: Sequence[int],
        shape: Sequence[int],
        context: Context,
        merged: Merged | None = None,
    ) -> "ShardedVolume":
        """Wrap slabs."""
        # The shell claims to need a gradient. A custom autograd.Function that it passes through then leaves its mark on
        # the result (grad_fn), and can be refused: autograd does not see the slabs inside.
        first = slabs[0]
        dtype, size = first.dtype, torch.Size(shape)
        differentiable = dtype.is_floating_point or dtype.is_complex
        shell = make_wrapper_subclass(cls, size, dtype=dtype, device=first.device, requires_grad=differentiable)
        shell._slabs = list(slabs)
        shell.dims = tuple(dims)
        shell.context = context
        shell._shape = size
        if merged is not None:
            shell.merged = merged
        return shell

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # torch's checkpointing saves a block's arguments as autograd does, and reads them back through this call.
            # The slabs keep their history, which a recomputation does not use.
            volume: ShardedVolume = args[0]
            if not isinstance(volume.pending, Waiting):
                return wrap(volume, volume.slabs)
            # Saving writes nothing: a repetition must save the same tensors in the same order.
            return share_later(volume)
        if func in to_copies and not torch.is_grad_enabled():
            return func(args[0].full_tensor(), *args[1:], **(kwargs or {}))  # torch.tensor(volume)
        raise UnsupportedOperatorError(
            f"{func} reached the shell of a sharded volume below autograd, which does not see the slabs; call "
            f"full_tensor() first, or work on to_local()"
        )

    @property
    def slabs(self) -> list[Tensor]:
        """The slabs that this process holds; pending ones are written now."""
        return self.pending.show(self)

    def settle(self, halos: Sequence[Halo] = ()) -> Wait | None:
        """Write what waits; with ``halos``, start their exchange and return the function that waits for it."""
        return self.pending.settle(self, halos)

    # Properties of the shell: asked for often, so they do not go through the table.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the whole volume."""
        return self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._shape)

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self._shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type."""
        return self._slabs[0].dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the first slab of this process."""
        return self._slabs[0].device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether the slabs are on GPUs."""
        return self._slabs[0].is_cuda

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether gradients flow to the slabs."""
        if self.is_saved:
            return False
        self.pending.settle(self)
        return any(slab.requires_grad for slab in self._slabs)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        for slab in self.slabs:
            slab.requires_grad_(wanted)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the user made the slabs."""
        return all(slab.is_leaf for slab in self.slabs)

    @property
    def grad(self) -> "ShardedVolume | None":  # type: ignore[override]
        """Gradients of the slabs, if they are leaves or retain theirs, as a volume."""
        gradients = [slab.grad for slab in self.slabs]
        if all(gradient is None for gradient in gradients):
            return None
        filled = [torch.zeros_like(s) if g is None else g for s, g in zip(self.slabs, gradients, strict=True)]
        return wrap(self, filled)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, ShardedVolume):
            gradient = relaid(from_whole(gradient, self.dims, self.context), self.merged)
        parts = [None] * len(self.slabs) if gradient is None else gradient.slabs
        for slab, part in zip(self.slabs, parts, strict=True):
            slab.grad = part

    @property
    def sizes(self) -> list[int]:
        """Number of planes along each of ``dims``."""
        return [self._shape[dim] for dim in self.dims]

    @property
    def arrangement(self) -> tuple[int, ...]:
        """What a recording depends on beside the slabs (see ``device.graph``)."""
        return self.dims

    def pieces(self) -> list[Tensor]:
        """Return the slabs, as a recording copies them."""
        return self.slabs

    def with_pieces(self, pieces: Sequence[Tensor]) -> "ShardedVolume":
        """Return a volume of other slabs that is cut alike."""
        return wrap(self, pieces)

    def check_readable(self) -> None:
        """Refuse to read the slabs past the operator table: of a changed original, or behind a custom function."""
        check_history(self)
        if self.origin is not None:
            self.origin.check()

    def to_local(self) -> Tensor:
        """Return this process's slab; if it holds several, read ``slabs``."""
        self.check_readable()
        if len(self.slabs) != 1:
            raise UnsupportedOperatorError(
                f"this process holds {len(self.slabs)} slabs of the volume, and to_local() returns one; read .slabs"
            )
        return self.slabs[0]

    def full_tensor(self) -> Tensor:
        """Gather the whole volume on the first device, or on every process of the group. Gradients flow back."""
        self.check_readable()
        if self.merged is not None:
            (dim,) = self.dims
            return self.unmerged().full_tensor().flatten(dim, dim + 2)
        return self.context.communicator.gather(self.slabs, self.dims, self.sizes)

    def unmerged(self) -> "ShardedVolume":
        """Return the volume with its cut dim split off again: ``(..., outer, planes, unit, ...)``."""
        assert self.merged is not None
        (dim,) = self.dims
        outer, unit = self.merged
        slabs = [slab.unflatten(dim, (outer, slab.shape[dim] // (outer * unit), unit)) for slab in self.slabs]
        planes = self._shape[dim] // (outer * unit)
        shape = (*self._shape[:dim], outer, planes, unit, *self._shape[dim + 1 :])
        return ShardedVolume(slabs, (dim + 1,), shape, self.context)

    def owned(self) -> list[list[Span]]:
        """Return, for each slab of this process, the entries of each cut dim that it holds.

        Raises
        ------
        UnsupportedOperatorError
            If they are not one span.
        """
        communicator = self.context.communicator
        if self.merged is None:
            return communicator.owned(self.sizes)
        if self.merged.outer > 1:
            raise UnsupportedOperatorError(
                f"dim {self.dims[0]} of a volume of shape {tuple(self._shape)} was merged with dims in front of the "
                f"cut one, so no shard owns one range of it; do this before the dims are merged"
            )
        layout = spans(self.sizes[0], communicator.num_shards, self.merged.unit)
        return [[layout[coordinates[0]]] for coordinates in communicator.coordinates]

    def extents(self) -> list[list[int]]:
        """Return, for each mesh axis, how many entries of its dim every shard holds."""
        outer, unit = self.merged or (1, 1)
        return [
            [outer * (stop - start) for start, stop in spans(size // outer, num_shards, unit)]
            for size, num_shards in zip(self.sizes, self.context.communicator.grid, strict=True)
        ]

    def as_subclass(self, cls: Any) -> Any:
        """Gather the volume as a tensor of another class, as MONAI's transforms make a MetaTensor of their input."""
        return self.full_tensor().as_subclass(cls)

    def __repr__(self) -> str:  # type: ignore[override]
        slabs = ", ".join(f"{tuple(slab.shape)} on {slab.device}" for slab in self._slabs)
        return f"ShardedVolume(shape={tuple(self._shape)}, dtype={self.dtype}, dims={self.dims}, slabs=[{slabs}])"

    def __len__(self) -> int:
        return self._shape[0]

    def __hash__(self) -> int:
        return id(self)


class _SameSlabs(Waiting):
    """The slabs of another volume that waits."""

    def __init__(self, volume: ShardedVolume) -> None:
        self.volume, self.stand_ins, self.unchanged = volume, list(volume._slabs), Unchanged(())

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> None:
        """Write the other volume, and take its slabs, which are shown: their memory is shared."""
        del halos
        volume._slabs = list(self.volume.slabs)
        recipe = self.volume.pending.find_recipe(self.volume)
        volume.pending = PLAIN_SHOWN if recipe is None else Shown(recipe, Unchanged((*volume._slabs, *recipe.tensors)))

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write the other volume if it must be."""
        self.volume.pending.settle_apart(self.volume)
        if not isinstance(self.volume.pending, Waiting):
            self.settle(volume)


def share_later(volume: ShardedVolume) -> ShardedVolume:
    """Return a volume of the same slabs; a pending one stays pending."""
    return defer(_SameSlabs(volume), volume.dims, volume.shape, volume.context, volume.merged)


def defer(
    waiting: Waiting, dims: Sequence[int], shape: Sequence[int], context: Context, merged: Merged | None = None
) -> ShardedVolume:
    """Return a volume whose slabs are written later, and before any tensor is changed in place."""
    volume = ShardedVolume(waiting.stand_ins, dims, shape, context, merged)
    volume.pending = waiting
    context.defer(volume)
    return volume


def wrap(like: ShardedVolume, slabs: Sequence[Tensor], dims: Sequence[int] | None = None) -> ShardedVolume:
    """Return a volume of ``slabs``, cut like ``like``; ``dims`` are its cut dims if they have moved."""
    shape = list(slabs[0].shape)
    dims = like.dims if dims is None else tuple(dims)
    if like.context.communicator.num_shards > 1:
        for dim, size in zip(dims, like.sizes, strict=True):
            shape[dim] = size
    return ShardedVolume(slabs, dims, shape, like.context, like.merged)


def from_whole(whole: Tensor, dims: Sequence[int], context: Context, merged: Merged | None = None) -> ShardedVolume:
    """Cut a whole tensor."""
    if merged is None:
        return ShardedVolume(context.communicator.cut(whole, dims), dims, whole.shape, context)
    (dim,) = dims
    outer, unit = merged
    planes = whole.shape[dim] // (outer * unit)
    slabs = context.communicator.cut(whole.unflatten(dim, (outer, planes, unit)), (dim + 1,))
    return ShardedVolume([slab.flatten(dim, dim + 2) for slab in slabs], dims, whole.shape, context, merged)


def give_whole(volume: ShardedVolume) -> list[Tensor]:
    """Give each shard the whole volume; the owner of each plane gets all its gradients and sums them.

    This sends half as much back as spreading a gathered volume, whose gradient is summed on every shard.
    """
    outer, unit = volume.merged or (1, 1)
    if outer > 1:
        return volume.context.spread(volume.full_tensor())
    volume.check_readable()
    communicator, slabs = volume.context.communicator, volume.slabs
    for axis, (dim, size) in enumerate(zip(volume.dims, volume.sizes, strict=True)):
        slabs = communicator.fetch(slabs, Fetch(axis, dim, size, [(0, size)] * communicator.grid[axis], unit))
    return slabs


def relaid(volume: ShardedVolume, merged: Merged | None) -> ShardedVolume:
    """Return the same volume in another layout of its cut dim; entries move between shards as needed."""
    if volume.merged == merged:
        return volume
    (outer, unit), (new_outer, new_unit) = volume.merged or (1, 1), merged or (1, 1)
    (dim,), (size,) = volume.dims, volume.sizes
    context = volume.context
    if outer != 1 or new_outer != 1:
        return from_whole(volume.full_tensor(), volume.dims, context, merged)
    wanted = spans(size, context.communicator.num_shards, new_unit)
    slabs = context.communicator.fetch(volume.slabs, Fetch(0, dim, size, wanted, unit))
    return ShardedVolume(slabs, volume.dims, volume.shape, context, merged)
