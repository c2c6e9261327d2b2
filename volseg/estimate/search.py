"""Find the fastest candidate that fits, and the reason: pure functions, except for the ``follow`` that callers pass.

Tracing a candidate takes about a second, so candidates that cannot be the fastest are skipped. Lower bounds on their
times hold for every network, since large kernels are at least as efficient as small ones:

- A step with recomputation runs the kernels of the plain step, and more.
- Each of N GPUs runs a share of the kernels of one GPU, in at least 1/N of their time.
- A pipeline of N stages and m micro-batches is full for m rounds, and fills or drains for N - 1 more.
- Without replay, Python starts the forward pass of each of the m micro-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from volseg.estimate.candidate import LEVELS, Candidate, Estimate, name_candidate
from volseg.estimate.step_time import OF_STAGES

GIB = 2**30

SURE = 0.95
"""Share of a GPU's memory up to which an estimate surely fits: with margins, estimates were up to 5 % too small."""

Follow = Callable[[Candidate], Estimate]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search: estimates, skipped candidates, and the choice."""

    forecasts: tuple[Estimate, ...]
    """Estimates of all traced candidates."""
    skipped: tuple[tuple[Candidate, float], ...] = ()
    """Candidates that were not traced, as they cannot be the fastest, and a lower bound on the seconds of a step."""
    chosen: Estimate | None = None
    """The fastest candidate that surely fits, otherwise the fastest that runs; None if none runs."""
    why: str = ""
    """The reason for the choice, in one sentence."""


def judge(forecast: Estimate, capacity: int) -> Estimate:
    """Return the estimate, refused if it needs more than the ``capacity`` bytes of a GPU."""
    if forecast.refused is not None or forecast.memory is None or forecast.needed <= capacity:
        return forecast
    there = max(capacity, 0)
    return replace(forecast, refused=f"needs {forecast.needed / GIB:.1f} GiB, and there are {there / GIB:.1f} GiB")


def search(
    candidates: Sequence[Candidate],
    follow: Follow,
    capacity: int,
    batch_size: int,
    relieve: Callable[[Candidate], Sequence[Candidate]] = lambda _: (),
    *,
    thorough: bool = False,
    begin: Callable[[Sequence[Candidate]], None] = lambda _: None,
) -> Found:
    """Trace candidates until no remaining one can be faster, and choose one.

    Parameters
    ----------
    candidates : sequence of Candidate
        Candidates without recomputation, or with the requested recomputation.
    follow : callable
        Returns the estimate of a candidate.
    capacity : int
        Bytes of a GPU that a step may take.
    batch_size : int
        Samples of a step.
    relieve : callable
        Returns the alternatives to a candidate that does not fit, least recomputation first.
    thorough : bool
        Whether to trace also the candidates that cannot be the fastest.
    begin : callable
        Receives the candidates that are needed soon, so that other processes can start on them.

    Returns
    -------
    Found
        Estimates in the order of the candidates, each followed by its alternatives.
    """
    groups: dict[Candidate, list[Estimate]] = {candidate: [] for candidate in candidates}
    skipped: list[tuple[Candidate, float]] = []

    def loses(least: float) -> bool:
        best = _find_fastest(each for each in chain.from_iterable(groups.values()) if _is_sure(each, capacity))
        return not thorough and best is not None and best.seconds is not None and least >= best.seconds

    def bound(candidate: Candidate) -> float:
        return compute_lower_bound(candidate, chain.from_iterable(groups.values()), batch_size)

    def look(candidate: Candidate, least: float, group: list[Estimate]) -> Estimate | None:
        if loses(least):
            skipped.append((candidate, least))
            return None
        group.append(judge(follow(candidate), capacity))
        return group[-1]

    plain_ones: list[tuple[list[Estimate], Estimate, Sequence[Candidate]]] = []
    ordered = sort_candidates(candidates)
    # The others bound the pipelines, so most pipelines need not be traced.
    for several in ([each for each in ordered if (each.pipeline > 1) is staged] for staged in (False, True)):
        # The longest traces begin first, after the one that bounds the others.
        promising = [each for each in several if not loses(bound(each))]
        begin(sorted(promising, key=lambda each: (each.num_gpus > 1, -max(each.spatial, each.data))))
        for first in several:
            group = groups[first]
            plain = look(first, bound(first), group)
            if plain is None or (plain.memory is None and (plain.more_than is None or plain.more_than > capacity)):
                continue  # skipped, or refused for another reason than the memory
            if (thorough or not _is_sure(plain, capacity)) and (relieving := relieve(first)):
                plain_ones.append((group, plain, relieving))
    # All plain ones come first: the faster the best one is, the fewer alternatives can win.
    for group, plain, (*less, most) in plain_ones:
        # The plain step does not bound a step with other kernels.
        least = plain.seconds or 0.0 if plain.candidate.kernels == most.kernels else 0.0
        # The most recomputation first: if that does not fit, nothing does.
        last = look(most, least, group)
        if last is None or not last.runs:
            continue
        # If the most recomputation does not surely fit, neither does less, but less may still run.
        limit = capacity if _is_sure(last, capacity) else None
        for candidate in () if _is_sure(plain, limit) else less:
            relieved = look(candidate, least, group)
            if relieved is None or _is_sure(relieved, limit):
                break
    forecasts = tuple(chain.from_iterable(groups.values()))
    chosen, why = choose(forecasts, capacity)
    return Found(forecasts=forecasts, skipped=tuple(skipped), chosen=chosen, why=why)


def sort_candidates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates in the order to trace them: bounds for other candidates first, then the most promising."""
    # One GPU bounds all others. Replicas send the least, and large micro-batches need few kernels.
    return sorted(
        candidates,
        key=lambda each: (each.num_gpus > 1, each.pipeline, each.spatial, -each.data, -(each.split_size or 0)),
    )


def compute_lower_bound(candidate: Candidate, known: Iterable[Estimate], batch_size: int) -> float:
    """Return a lower bound on a candidate's seconds per step, from estimates of one GPU with the same kernels."""
    rounds = 1 if candidate.split_size is None else -(-batch_size // (candidate.data * candidate.split_size))
    bounds = [0.0]
    for forecast in known:
        one = forecast.candidate
        alike = (one.kernels, one.recorded) == (candidate.kernels, candidate.recorded) and one.checkpoint is None
        if not alike or forecast.seconds is None or candidate == one or one.num_gpus > 1:
            continue
        # A pipeline is full for this many rounds, and fills or drains in the others.
        bounds.append(forecast.seconds / candidate.num_gpus * (rounds + candidate.pipeline - 1) / rounds)
        if candidate.pipeline > 1 and not candidate.recorded:
            bounds.append(rounds * OF_STAGES * (forecast.host_forward_seconds or 0.0))
    return max(bounds)


def choose(forecasts: Sequence[Estimate], capacity: int | None = None) -> tuple[Estimate | None, str]:
    """Return the fastest candidate that runs, and the reason in one sentence; fewer GPUs win a tie.

    Parameters
    ----------
    forecasts : sequence of Estimate
        Estimates that `judge` returned.
    capacity : int, optional
        Bytes of a GPU that a step may take. A candidate that is estimated above the `SURE` share of them may run out of
        memory, so it is chosen only if nothing else runs.
    """
    best = _find_fastest(each for each in forecasts if _is_sure(each, capacity)) or _find_fastest(forecasts)
    if best is None:
        return None, _explain_refusals(forecasts)
    assert best.seconds is not None
    name, needs = name_candidate(best.candidate), _describe_need(best)
    if not _is_sure(best, capacity):
        needs += ", so near to all of it that it may not fit"
    others = [each for each in forecasts if each.runs and each is not best and each.seconds is not None]
    if not others:
        return best, f"{name} is the only one that runs ({needs})"
    next_best = min(others, key=_rank)
    alone = min((each for each in others if each.candidate.num_gpus == 1), key=_rank, default=None)
    assert next_best.seconds is not None
    is_beaten = next_best.seconds < best.seconds
    text = f"{name} is the fastest that {'surely ' if is_beaten else ''}fits: {describe_seconds(best.seconds)} per step"
    if alone is not None and alone.seconds is not None and best.candidate.num_gpus > 1:
        text += f", {alone.seconds / best.seconds:.1f} times one GPU"
    if is_beaten or next_best is not alone or best.candidate.num_gpus == 1:
        is_other_kernels = name_candidate(next_best.candidate) == name
        other = name_candidate(next_best.candidate, kernels=is_other_kernels)
        text += f"; {other} takes {describe_seconds(next_best.seconds)}"
        if is_beaten:
            text += f" and {_describe_need(next_best)}, so near to all of it that it may not fit"
    return best, f"{text} ({needs})"


def _is_sure(forecast: Estimate, capacity: int | None) -> bool:
    """Return whether a candidate runs even if its estimate is too small; without a capacity, whether it runs."""
    if not forecast.runs or capacity is None or forecast.memory is None:
        return forecast.runs
    return forecast.needed <= SURE * capacity


def _rank(forecast: Estimate) -> tuple[float, int, int, int]:
    """Return a sort key: time, then fewer GPUs, fewer stages, fewer slabs."""
    candidate = forecast.candidate
    assert forecast.seconds is not None
    return (forecast.seconds, candidate.num_gpus, candidate.pipeline, candidate.spatial)


def _find_fastest(forecasts: Iterable[Estimate]) -> Estimate | None:
    return min((each for each in forecasts if each.runs and each.seconds is not None), key=_rank, default=None)


def _describe_need(forecast: Estimate) -> str:
    return "" if forecast.memory is None else f"{forecast.needed / GIB:.1f} GiB of each GPU"


def guess_least(forecasts: Iterable[Estimate]) -> Estimate | None:
    """Return the candidate with a stopped trace that may need least: most GPUs, most recomputation, fewest cuts.

    Return None if no trace was stopped. The guess only decides which candidate is traced to its end.
    """
    levels = [None, *LEVELS]

    def rank(given_up: Estimate) -> tuple[int, int, int, int, int]:
        each = given_up.candidate
        return each.num_gpus, levels.index(each.checkpoint), -each.spatial, each.pipeline, -(each.split_size or 0)

    return max((each for each in forecasts if each.more_than is not None), key=rank, default=None)


def _explain_refusals(forecasts: Sequence[Estimate]) -> str:
    measured = [each for each in forecasts if each.memory is not None]
    if measured:
        least = min(measured, key=lambda each: each.needed)
        if any(each.more_than is not None for each in forecasts):
            return f"nothing fits: {name_candidate(least.candidate)} {least.refused}"
        return f"nothing fits; the least is {name_candidate(least.candidate)}, which {least.refused}"
    first = next((each for each in forecasts if each.refused), None)
    return "nothing runs" + ("" if first is None else f": {name_candidate(first.candidate)}: {first.refused}")


def describe_seconds(seconds: float) -> str:
    """Return a time as text, with three digits.

    >>> describe_seconds(0.01234), describe_seconds(2.5), describe_seconds(90), describe_seconds(7300)
    ('12.3 ms', '2.50 s', '1.5 min', '2.0 h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
