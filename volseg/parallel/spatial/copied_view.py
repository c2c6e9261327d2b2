"""Mark copies where torch has a view: planes that had to move between shards, and slabs in another layout.

``v = y[:, :, 2:8]`` is a view in torch: an in-place change of ``v`` changes ``y``, and vice versa. Along the cut it is
a copy, because its planes are balanced anew over the shards. So the copy may be read as long as the original is
unchanged, and may not be changed itself. Each access checks both rules.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import (
    get_storage_key,
    get_version,
    tree_leaves,
    tree_map,
    without_subclass_overrides,
)
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.signatures import writes
from volseg.parallel.spatial.sources import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume


class Origin:
    """Original tensors of a copy, and their versions at the time of copying.

    The tensors are kept alive, as a view keeps them alive.
    """

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], parents: Iterable["Origin"]) -> None:
        self.parents = list(parents)
        self._source = Unchanged(list(tensors))
        # Only numbers: a copy knows its origin, and the origin must not keep the copy alive.
        self.own_versions = [get_version(copy) for copy in copies]

    def check(self) -> None:
        """Refuse to read a copy whose original has changed since."""
        for parent in self.parents:
            parent.check()
        if not self._source.holds():
            raise UnsupportedOperatorError(
                "a volume was changed in place after a slice (or another view) of it was taken across the cut, which "
                "is a copy there and does not see the change; take the slice after the change, or change out of place"
            )

    def check_unchanged(self, volume: ShardedVolume) -> None:
        """Refuse an in-place change of a copy."""
        if [get_version(slab) for slab in volume._slabs] != self.own_versions:
            _refuse_write(volume.context.module_path())


def _refuse_write(where: str) -> None:
    raise UnsupportedOperatorError(
        f"{where} changes a slice (or another view) of a volume in place, which is a copy here because its planes are "
        f"on other shards or in another layout: the volume would not see the change. Assign to the volume instead, as "
        f"in y[:, :, 2:8] = y[:, :, 2:8] * 0, or work out of place"
    )


class CopiedView(Tensor):
    """An ordinary tensor, equal on every shard, that is a view of a volume in torch."""

    origin: Origin
    place: Callable[[], str]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, ShardedVolume) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        with without_subclass_overrides():
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CopiedView)]
            for view in given:
                view.origin.check()
            versions = [get_version(view) for view in given]
            if writes(func) and isinstance(args[0], CopiedView):
                _refuse_write(args[0].place())
            result = func(*args, **kwargs)
            for view, version in zip(given, versions, strict=True):
                if get_version(view) != version:
                    _refuse_write(view.place())
            if isinstance(result, torch.Size):  # tree_map would turn it into a tuple
                return result
            # A view of the copy is a view of the volume.
            known = {get_storage_key(view.untyped_storage()): view for view in given}

            def kept(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor) or get_storage_key(leaf.untyped_storage()) not in known:
                    return leaf
                view = known[get_storage_key(leaf.untyped_storage())]
                return _copied(leaf, view.origin, view.place)

            return tree_map(kept, result)


def _copied(tensor: Tensor, origin: Origin, place: Callable[[], str]) -> CopiedView:
    view = tensor.as_subclass(CopiedView)
    view.origin, view.place = origin, place
    return view


def mark_copies(result: Any, given: Sequence[ShardedVolume], perhaps: bool) -> Any:
    """Mark the copies in a function's result where torch returns views of its arguments.

    With ``perhaps``, torch returns a view or a copy depending on the whole volume's memory layout, which is unknown
    here; so neither may be changed.
    """
    parents = [volume.origin for volume in given if volume.origin is not None]
    # Compared slab by slab: a piece of a neighbour's slab is not a view of this process's slab.
    owned = [_memory(volume._slabs) for volume in given]
    sources = [slab for volume in given for slab in volume._slabs]

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, ShardedVolume):
            if any(leaf is volume for volume in given) or all(leaf.dtype != volume.dtype for volume in given):
                return leaf
            if perhaps or parents or _memory(leaf._slabs) not in owned:
                leaf.origin = Origin(sources, leaf._slabs, parents)
        elif isinstance(leaf, Tensor) and (perhaps or parents or _memory([leaf]) not in owned):
            return _copied(leaf, Origin(sources, [leaf], parents), given[0].context.module_path)
        return leaf

    return tree_map(mark, result)


def _memory(slabs: Sequence[Tensor]) -> list[int]:
    return [get_storage_key(slab.untyped_storage()) for slab in slabs]


def plain(value: Any) -> Any:
    """Return a copied view as an ordinary tensor, for code outside the network; leave other values unchanged.

    Raises
    ------
    UnsupportedOperatorError
        If the original was changed since: later accesses are not checked.
    """
    if not isinstance(value, CopiedView):
        return value
    value.origin.check()
    return value.as_subclass(Tensor)
