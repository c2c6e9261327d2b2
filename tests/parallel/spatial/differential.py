"""Compare everything that a caller can see of one torch function, on whole tensors and on volumes.

Besides values, shapes and dtypes these are the gradients, what the call left in its arguments, and what a later change
in place does: of the output to the arguments, of the arguments to the output. A volume that merely holds the right
numbers passes none of the latter. Nothing here knows how a handler is written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole


@dataclass(frozen=True)
class Placement:
    """Which of a call's tensors are volumes, by the dims that they are cut along.

    ``thin``: one of the few. ``merged``: how the cut dim was merged with its neighbours, None for planes.
    """

    cuts: dict[int, tuple[int, ...]]
    grid: tuple[int, ...]
    thin: bool = False
    merged: Merged | None = None

    def __str__(self) -> str:
        cut = ", ".join(f"tensor {index} along {','.join(map(str, dims))}" for index, dims in self.cuts.items())
        layout = "" if self.merged is None else ", merged"
        return f"{cut}{layout}; {'x'.join(map(str, self.grid))} shards"


PLAIN = Placement({}, ())
DETACHED = ", without gradients"
OTHER_SEEDS = {f"call with seed {seed}": seed for seed in (1, 2, 3)}


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is one of equal, refused, raises (torch raises too), WRONG, CRASH; ``kind`` says what differs."""

    outcome: str
    kind: str = ""
    detail: str = ""


@dataclass
class Seen:
    """What a caller sees of one call.

    ``flags`` says which outputs need a gradient, ``changed`` lists the arguments that the call changed in place,
    ``later`` what each change after the call met, and ``shares`` says whether an output lies in the memory of an
    argument.
    """

    structure: Any
    values: list[Any]
    inputs: list[Tensor]
    flags: list[bool]
    gradients: "list[Tensor | None] | Exception | None"
    changed: list[int]
    later: "list[Exception | None]"
    shares: bool


@dataclass
class Call:
    """One call of one function; ``note`` tells the samples of an operator apart.

    ``random``: where the result hangs on the seed, only shapes, dtypes and repeatability can agree. ``undefined``: not
    even the latter. ``grids``: cut along two dims at once, too.
    """

    operator: str
    variant: str
    function: Callable
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    random: bool = False
    undefined: bool = False
    grids: bool = False

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The distinct tensors among the arguments; only strided ones can be volumes."""
        leaves = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        return list({id(leaf): leaf for leaf in leaves if leaf.layout == torch.strided}.values())

    def __str__(self) -> str:
        values = [_brief(value) for value in self.args] + [f"{key}={_brief(v)}" for key, v in self.kwargs.items()]
        return f"{self.note} ({', '.join(values)})"

    @cached_property
    def _plain(self) -> dict[str, "Seen | Exception"]:
        return {}

    def plain(self, step: str) -> "Seen | Exception":
        """Return what torch does; the same for every placement."""
        if step not in self._plain:
            self._plain[step] = attempt(self, PLAIN, step)
        return self._plain[step]


@cache
def _shards(grid: tuple[int, ...]) -> LocalDevices:
    # Real copies: "cpu:1" is copied to as a second GPU of one process is.
    return LocalDevices([f"cpu:{index}" if index else "cpu" for index in range(prod(grid))], grid)


@cache
def _plans(grid: tuple[int, ...]) -> dict[Any, Any]:
    """Return what all calls on these shards have planned, as the operators of one network do: a third of the time.

    A plan that is found for another call than its own is seen as a wrong result of one of the two.
    """
    return {}


def make_context(grid: tuple[int, ...]) -> Context:
    context = Context(_shards(grid))
    context._plans = _plans(grid)
    return context


@cache
def _weights(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def weighted(values: Sequence[Any]) -> Tensor | None:
    """Return a number that depends on every voxel of every differentiable value in its own way."""
    total = None
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided:
            term = (value * _weights(value.shape, value.dtype)).sum()
            term = (term.real if term.is_complex() else term).double()
            total = term if total is None else total + term
    return total


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedVolume) else value


def _change(tensor: Tensor) -> None:
    """Change every element, zeros too, and what the gradient is."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.mul_(2)
        tensor.add_(1)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Set the CPU's seed, alone: that of every device takes ten times as long."""
    torch.default_generator.manual_seed(seed)
    if seed == 0:
        yield
        return

    def seeded(_: int) -> torch.Generator:
        return torch.default_generator.manual_seed(seed)

    # The database's random functions set a seed of their own before they draw.
    with mock.patch.object(torch, "manual_seed", seeded):
        yield


def attempt(call: Call, placement: Placement, step: str) -> Seen | Exception:
    """Call once; ``step`` is "call", or "output" or "input": what is changed in place afterwards.

    With ``DETACHED`` behind it, no argument needs a gradient; torch then allows more changes. Those of
    ``OTHER_SEEDS`` draw other random numbers.
    """
    try:
        return _attempt(call, placement, step)
    except Exception as fault:
        return fault.with_traceback(None)  # its frames hold the tensors


def _attempt(call: Call, placement: Placement, step: str) -> Seen:
    # The arguments are no leaves: leaves that need a gradient cannot be changed in place.
    trained = not step.endswith(DETACHED)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad and trained) for tensor in call.tensors]
    given: list[Tensor] = [leaf.clone() for leaf in leaves]
    if placement.cuts:
        context = make_context(placement.grid)
        for index, dims in placement.cuts.items():
            given[index] = from_whole(given[index], dims, context, placement.merged)
    stand_ins = {id(tensor): value for tensor, value in zip(call.tensors, given, strict=True)}
    args, kwargs = tree_map(lambda leaf: stand_ins.get(id(leaf), leaf), (call.args, call.kwargs))
    versions = [] if placement.cuts else [tensor._version for tensor in given]
    with _seeded(OTHER_SEEDS.get(step, 0)):
        values, structure = tree_flatten(call.function(*args, **kwargs))
    outputs = [value for value in values if isinstance(value, Tensor)]
    changed = [i for i, version in enumerate(versions) if given[i]._version != version]
    shares = not placement.cuts and _share(outputs, given)
    later: list[Exception | None] = []
    if step.startswith(("output", "input")):
        plain = call.plain(step) if placement.cuts else None
        met = plain.later if isinstance(plain, Seen) else []
        for index, tensor in enumerate(outputs if step.startswith("output") else given):
            wanted = met[index] if index < len(met) else None
            try:
                _change(tensor)
                later.append(None)
            except Exception as fault:
                # Torch refuses this change, so may we; what only we refuse ends the comparison.
                if placement.cuts and wanted is None:
                    raise
                later.append(fault.with_traceback(None))
    if placement.cuts:
        plain = call.plain("call")
        changed = plain.changed if isinstance(plain, Seen) else []
    after = [whole(tensor) for tensor in given]
    values = [whole(value) for value in values]
    watched = values + [after[index] for index in (range(len(after)) if later else changed)]
    gradients = differentiated(watched, leaves)
    flags = [value.requires_grad for value in values if isinstance(value, Tensor)]
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    return Seen(structure, values, [a.detach() for a in after], flags, gradients, changed, later, shares)


def _share(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    held = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    return any(o.layout == torch.strided and o.numel() and o.untyped_storage().data_ptr() in held for o in outputs)


def differentiated(values: Sequence[Any], leaves: Sequence[Tensor]) -> "list[Tensor | None] | Exception | None":
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not trained:
        return None
    try:
        total = weighted(values)
        return None if total is None else list(torch.autograd.grad(total, trained, allow_unused=True))
    except Exception as fault:
        return fault.with_traceback(None)


def differs(actual: Any, expected: Any, computed: torch.dtype | None = None) -> str:
    """Return how two values differ: "" where they do not; ``computed`` is the dtype whose rounding is allowed."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = type(actual) is type(expected) and (
            actual == expected or (isinstance(expected, float) and actual != actual and expected != expected)
        )
        return "" if same else f"value: {_short(actual)} instead of {_short(expected)}"
    for what in ("shape", "dtype", "device"):
        found, wanted = getattr(actual, what), getattr(expected, what)
        if found != wanted:
            return f"{what}: {_short(found)} instead of {_short(wanted)}"
    if actual.layout == expected.layout == torch.strided and actual.equal(expected):  # much faster than what follows
        return ""
    try:
        rounding: dict[str, float] = {}
        if computed is not None and expected.dtype.is_floating_point:
            rounding["rtol"], rounding["atol"] = default_tolerances(computed, expected)
        torch.testing.assert_close(actual, expected, equal_nan=True, **rounding)
    except AssertionError as fault:
        return "value: " + " ".join(str(fault).split())
    return ""


def _short(value: Any) -> str:
    return (str(tuple(value)) if isinstance(value, torch.Size) else repr(value))[:80]


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple) and any(isinstance(leaf, Tensor) for leaf in value):
        return f"[{', '.join(map(_brief, value))}]"
    return repr(value)[:80]


REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError)
"""How torch refuses a call: one by another of these on the meta device, where we ask it, than on a CPU."""


def _alike(fault: Exception, expected: Exception) -> bool:
    same_kind = isinstance(fault, REFUSALS) and isinstance(expected, REFUSALS)
    return same_kind or isinstance(fault, UnsupportedOperatorError | type(expected))


def said(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"


def judge(call: Call, placement: Placement, later: bool = True) -> Verdict:
    """Say what a call on volumes does, beside the plain call; with ``later``, also what a change after it does."""
    actual = attempt(call, placement, "call")
    expected = call.plain("call")
    if isinstance(expected, Exception):
        if not isinstance(actual, Exception):
            return Verdict("WRONG", "accepts what torch refuses", said(expected))
        if _alike(actual, expected):
            return Verdict("raises")
        return Verdict("CRASH", "another error than torch's", f"{said(actual)} instead of {said(expected)}")
    if isinstance(actual, UnsupportedOperatorError):
        return Verdict("refused")
    if isinstance(actual, Exception):
        return Verdict("CRASH", "call", said(actual))
    if call.undefined or (call.random and draws(expected, map(call.plain, OTHER_SEEDS))):
        again = attempt(call, placement, "call")
        if isinstance(again, Exception):
            return Verdict("CRASH", "second call", said(again))
        return _judge_random(actual, expected, actual if call.undefined else again, placement)
    verdict = judge_seen(actual, expected, "")
    steps = ("output", "input") if expected.shares else ("output",)
    for step in steps if later and verdict.outcome == "equal" else ():
        verdict = _judge_later(call, placement, step)
        if verdict.outcome != "equal":
            break
    return verdict


def judge_seen(actual: Seen, expected: Seen, when: str) -> Verdict:
    if actual.structure != expected.structure:
        return Verdict("WRONG", f"structure{when}", f"{actual.structure} instead of {expected.structure}")
    for kind, found, wanted in (
        ("output", actual.values, expected.values),
        ("argument after the call", actual.inputs, expected.inputs),
    ):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if difference := differs(one, other):
                what, _, detail = difference.partition(": ")
                return Verdict("WRONG", f"{what} of {kind}{when}", f"{index}: {detail}")
    if actual.flags != expected.flags:
        return Verdict("WRONG", f"requires_grad of output{when}", f"{actual.flags} instead of {expected.flags}")
    if isinstance(expected.gradients, Exception) or (expected.gradients is None and actual.gradients is None):
        return Verdict("equal")
    if isinstance(actual.gradients, UnsupportedOperatorError):
        return Verdict("refused")
    if isinstance(actual.gradients, Exception):
        return Verdict("CRASH", f"backward{when}", said(actual.gradients))
    # float32 outputs of float64 arguments: their gradients were float32 on the way.
    floating = [value.dtype for value in expected.values if isinstance(value, Tensor) and value.is_floating_point()]
    coarsest = max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    for index, (one, other) in enumerate(zip(actual.gradients or [], expected.gradients or [], strict=True)):
        if one is None and other is None:
            continue
        one, other = (torch.zeros_like(some) if each is None else each for each, some in ((one, other), (other, one)))
        if difference := differs(one, other, coarsest):
            return Verdict("WRONG", f"gradient{when}", f"of tensor {index}: {difference}")
    return Verdict("equal")


def _judge_later(call: Call, placement: Placement, step: str) -> Verdict:
    """Compare what a change in place does after the call; to refuse it is as good as to do it."""
    when = f" after a change of the {step}"
    expected = call.plain(step)
    if not isinstance(expected, Exception) and any(expected.later):
        step += DETACHED
        expected = call.plain(step)
    if isinstance(expected, Exception):
        return Verdict("equal")
    actual = attempt(call, placement, step)
    if isinstance(actual, UnsupportedOperatorError):
        return Verdict("equal")
    if isinstance(actual, Exception):
        return Verdict("CRASH", f"change of the {step}", said(actual))
    for mine, theirs in zip(actual.later, expected.later, strict=True):
        if theirs is not None and mine is None:
            return Verdict("WRONG", f"accepts a change of the {step} that torch refuses", said(theirs))
        if theirs is not None and mine is not None and not _alike(mine, theirs):
            return Verdict("CRASH", f"change of the {step}", said(mine))
    verdict = judge_seen(actual, expected, when)
    return Verdict("equal") if verdict.outcome == "refused" else verdict


def draws(expected: Seen, others: Iterable["Seen | Exception"]) -> bool:
    """Say whether torch's result hangs on the seed; that of a dropout in evaluation does not."""
    return any(isinstance(other, Exception) or judge_seen(other, expected, "").outcome != "equal" for other in others)


def _judge_random(actual: Seen, expected: Seen, again: Seen, placement: Placement) -> Verdict:
    """Compare what hangs on no seed; and where the volume is constant, whether planes of two slabs are alike."""
    if actual.structure != expected.structure:
        return Verdict("WRONG", "structure", f"{actual.structure} instead of {expected.structure}")
    for one, other, same in zip(actual.values, expected.values, again.values, strict=True):
        if isinstance(other, Tensor):
            for what in ("shape", "dtype", "device"):
                if not isinstance(one, Tensor) or getattr(one, what) != getattr(other, what):
                    return Verdict("WRONG", f"{what} of output", f"{one!r:.80} instead of {other!r:.80}")
            if difference := differs(same, one):
                return Verdict("WRONG", "repeatability", difference)
            for dim in next(iter(placement.cuts.values())) if other.shape == expected.inputs[0].shape else ():
                slabs = [value.unflatten(dim, (2, -1)).unbind(dim) for value in (one, other) if value.shape[dim] == 6]
                if slabs and slabs[0][0].equal(slabs[0][1]) != slabs[1][0].equal(slabs[1][1]):
                    return Verdict("WRONG", "slabs draw alike, or channels differ between slabs", f"dim {dim}")
    return Verdict("equal")


def placements(call: Call) -> Iterator[Placement]:
    """List which tensors of a call are cut, and how, alone and together.

    Every dim, into two shards and three; a volume along D, H, W, one of them into three, and along two of them at once.
    """
    tensors = call.tensors
    for base, tensor in enumerate(tensors[:2]):
        sizes, is_volume = tensor.shape, call.grids and tensor.ndim == 5
        dims = [dim for dim in range(2 if is_volume else 0, tensor.ndim) if sizes[dim] >= 2]
        few = 2 if tensor.ndim >= 4 and 2 in dims else (dims or [0])[-1]
        for dim in dims:
            # Four planes in three shards: slabs of several sizes.
            for shards in (2, 3) if sizes[dim] > 2 and (dim == 3 or not is_volume) else (2,):
                for cuts in _together(tensors, base, (dim,)):
                    yield Placement(cuts, (shards,), thin=dim == few and shards == 2)
        if base == 0 and len(tensors) > 1 and tensors[1].shape == sizes and len(dims) > 1:
            yield Placement({0: (dims[-2],), 1: (dims[-1],)}, (2,))
        for pair in combinations(dims, 2) if is_volume else ():
            for cuts in _together(tensors, base, pair):
                yield Placement(cuts, (2, 2), thin=pair == (2, 3) and base == 0 and len(cuts) == 1)


def _together(tensors: Sequence[Tensor], base: int, dims: tuple[int, ...]) -> Iterator[dict[int, tuple[int, ...]]]:
    """Cut one tensor alone; the first also with all of its shape, and with all that have its size there."""
    yield {base: dims}
    if base:
        return
    first = tensors[0]
    alike = {i: dims for i, tensor in enumerate(tensors) if tensor.shape == first.shape}
    fitting = {}
    for index, tensor in enumerate(tensors):
        # Counted from the end, as broadcasting does; labels (B, D, H, W) then lie as their logits (B, C, D, H, W).
        own = [dim - first.ndim + tensor.ndim for dim in dims]
        if all(at >= 0 and tensor.shape[at] == first.shape[dim] for at, dim in zip(own, dims, strict=True)):
            fitting[index] = tuple(own)
    if len(alike) > 1:
        yield alike
    if len(fitting) > 1 and fitting != alike:
        yield fitting
