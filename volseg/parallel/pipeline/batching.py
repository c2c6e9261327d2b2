"""Find the tensors of a call, and of its outputs, with one row per sample; never guess from a length.

A factor per channel may be as long as the batch, and a mean over the batch ``(1, ...)`` as long as a micro-batch of one
sample. If several arguments are as long as the batch, ``batched=`` must name those to cut. To see which outputs have
one row per sample, the network runs with a number of samples that occurs nowhere else in the call. This run has no side
effects: it saves nothing for backward, and changed state is restored. There is one for each condition of the network.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from volseg.device.torch_internals import pytree
from volseg.errors import ParallelError
from volseg.parallel.pipeline.micro_batch import (
    PLAIN,
    Call,
    check_length,
    copy_call,
    mark_batch_candidates,
    resize_call,
)

Returned: TypeAlias = tuple[Hashable, ...]
"""Structure of a run's output, and for each leaf the number of dimensions of a tensor, or a plain value."""

Runner: TypeAlias = Callable[[Call, bool, Callable[[Any], Returned]], Returned]
"""Function that runs the network without side effects; the flag enables the user's hooks. Returns what the function
returns for the output."""

MOST_KNOWN = 64
"""Conditions of the network for which outputs are cached."""


def _describe(values: Any) -> Returned:
    """Describe outputs, or a call, without sizes."""
    leaves, structure = pytree.tree_flatten(values)
    return str(structure), *map(_describe_leaf, leaves)


def _describe_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return Tensor, leaf.dim()
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else (type(leaf), "another object")


def _covers(known: Returned, found: Returned) -> bool:
    """Return whether ``found`` has only known kinds of outputs, or None in their places."""
    return known[0] == found[0] and all(
        mine == theirs or theirs == (type(None), None) for mine, theirs in zip(known[1:], found[1:], strict=True)
    )


class Batching:
    """Find the tensors with one row per sample.

    Parameters
    ----------
    declared
        Positions and names of these arguments; ``None`` to find them.
    names
        Names of the arguments that may be passed by position.
    """

    def __init__(self, declared: Sequence[int | str] | None = None, names: Sequence[str] = ()) -> None:
        self._declared = None if declared is None else tuple(declared)
        self._same: dict[int | str, int | str] = {**dict(enumerate(names)), **{n: i for i, n in enumerate(names)}}
        self._returned: dict[Hashable, list[Returned]] = {}

    def mark_batch_arguments(self, call: Call) -> list[bool]:
        """Return which leaves of ``call`` have one row per sample.

        Raises
        ------
        ParallelError
            If several may have, and none were declared, or if they differ from the declared ones.
        """
        if self._declared is not None:
            return _resolve_declared(call, self._declared, self._same)
        possible = mark_batch_candidates(call)
        if sum(possible) > 1:
            names = ", ".join(compress(_name_leaves(call), possible))
            raise ParallelError(
                f"the arguments {names} are as long as the batch; state which have one row per sample: "
                "ModelParallel(..., batched=[...]) with their positions or names"
            )
        return possible

    def prove(
        self, condition: Hashable, call: Call, is_batch: Sequence[bool], size: int, runner: Runner
    ) -> Callable[[Any], None]:
        """Check that the network's outputs grow with the number of samples; return a check of the batch's own output.

        Parameters
        ----------
        condition
            State on which the kind of outputs may depend, besides the form of the call.
        call, is_batch
            The batch, and which of its leaves are cut.
        size
            Samples of each micro-batch.
        runner
            Runs the network without side effects.

        Raises
        ------
        ParallelError
            If an output does not have one row per sample; from the returned function, if an output is of another kind
            for another number of samples.
        """
        key = condition, _describe(call), tuple(is_batch), size
        if key not in self._returned:
            if len(self._returned) >= MOST_KNOWN:
                self._returned.clear()
            self._returned[key] = [self._look(call, is_batch, size, runner)]
        kinds = self._returned[key]

        def confirm(output: Any) -> None:
            returned = _describe(output)
            if any(_covers(known, returned) for known in kinds):
                return
            again = self._look(call, is_batch, size, runner)
            if not _covers(again, returned):
                raise ParallelError(
                    f"the network returns {returned[1:]} for a micro-batch of {size}, but {again[1:]} for another "
                    "number of samples; the pipeline needs outputs that do not depend on the number of samples"
                )
            kinds.append(again)

        return confirm

    def _look(self, call: Call, is_batch: Sequence[bool], size: int, runner: Runner) -> Returned:
        """Run another number of samples, and return its kind of outputs.

        First without gradients and hooks, then as the user does: a network may differentiate inside, or need a hook
        that changes shapes.
        """
        samples = _choose_unusual_number(call, size)
        failures: list[Exception] = []

        def check(output: Any) -> Returned:
            for number, leaf in enumerate(pytree.tree_leaves(output)):
                if isinstance(leaf, Tensor):
                    check_length(leaf, samples, number)
            return _describe(output)

        for as_user in (False, True):
            try:
                with torch.set_grad_enabled(as_user and torch.is_grad_enabled()):
                    return runner(copy_call(resize_call(call, is_batch, samples)), as_user, check)
            except Exception as failure:  # the second run may succeed
                failures.append(failure)
        if unlike := [failure for failure in failures if isinstance(failure, ParallelError)]:
            raise unlike[0]
        runner(copy_call(call), True, _describe)  # a network that cannot run the batch itself raises its own error
        raise ParallelError(
            f"the pipeline ran {samples} samples instead of {size} to find the outputs with one row per sample; this "
            f"run failed: {failures[0]}. Choose a split_size that leaves a remainder, or the "
            "whole batch"
        ) from failures[0]


def _choose_unusual_number(call: Call, size: int) -> int:
    """Return a number of samples that is not a length of the call's tensors, and not ``size``."""
    lengths = {size, *(n for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor) for n in leaf.shape)}
    return next(number for number in range(2, len(lengths) + 3) if number not in lengths)


def _resolve_declared(call: Call, declared: Sequence[int | str], same: Mapping[int | str, int | str]) -> list[bool]:
    args, kwargs = call
    chosen: list[bool] = []
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in given:
        is_declared = name in declared or same.get(name) in declared
        chosen += [is_declared and isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)]
    lengths = {len(leaf) if leaf.dim() else 0 for leaf in compress(pytree.tree_leaves(call), chosen)}
    if len(lengths) != 1 or 0 in lengths:
        raise ParallelError(
            f"the tensors in the arguments batched={list(declared)} have one row per sample, so they must have the "
            f"same length; found {sorted(lengths) or 'none'} among {', '.join(_name_leaves(call))}"
        )
    return chosen


def _name_leaves(call: Call) -> list[str]:
    """Return a name for each leaf, for messages."""
    args, kwargs = call
    return [
        f"{name if isinstance(name, str) else f'number {name}'} {tuple(leaf.shape) if isinstance(leaf, Tensor) else ''}"
        for name, value in (*enumerate(args), *kwargs.items())
        for leaf in pytree.tree_leaves(value)
    ]
