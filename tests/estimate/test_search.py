"""The choice of a strategy, on constructed estimates."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volseg.estimate.candidate import Candidate, Estimate, Freedom, list_candidates, name_candidate, relieve
from volseg.estimate.largest_volume import Largest, find_largest, scale_sides
from volseg.estimate.search import choose, compute_lower_bound, guess_least, judge, search
from volseg.estimate.step_memory import MemoryUse

GIB = 2**30


def forecast(seconds=1.0, gib=1.0, refused=None, **candidate):
    memory = MemoryUse(used=int(gib * GIB), reserved=int(gib * GIB), outside=0, peak_in="backward")
    return Estimate(candidate=Candidate(**candidate), memory=memory, seconds=seconds, refused=refused)


def test_the_fastest_that_fits_is_chosen_and_compared():
    forecasts = [
        forecast(1.0, 8),
        forecast(0.2, 30, refused="needs 30.0 GiB, and there are 16.0 GiB", spatial=4),
        forecast(0.3, 4, data=4),
        forecast(0.4, 4, pipeline=4, split_size=1),
    ]
    chosen, why = choose(forecasts)
    assert chosen is forecasts[2]
    assert why == (
        "data: 4 is the fastest that fits: 300 ms per step, 3.3 times one GPU; pipeline: 4, split_size: 1 takes 400 ms "
        "(4.0 GiB of each GPU)"
    )


@pytest.mark.parametrize(
    ("forecasts", "first", "why"),
    [
        (
            [forecast(0.01), forecast(0.02, data=2)],
            True,
            "one GPU is the fastest that fits: 10 ms per step; data: 2 takes 20 ms (1.0 GiB of each GPU)",
        ),
        (
            [forecast(1.0, kernels="fast"), forecast(2.0, kernels="torch")],
            True,
            "one GPU is the fastest that fits: 1.00 s per step; one GPU, torch kernels takes 2.00 s (1.0 GiB of each "
            "GPU)",
        ),
        ([forecast(1.0, 3)], True, "one GPU is the only one that runs (3.0 GiB of each GPU)"),
        (
            [judge(forecast(gib=40), 16 * GIB), judge(forecast(gib=20, spatial=2), 16 * GIB)],
            False,
            "nothing fits; the least is spatial: 2, which needs 20.0 GiB, and there are 16.0 GiB",
        ),
        ([Estimate(candidate=Candidate(), refused="no fft")], False, "nothing runs: one GPU: no fft"),
    ],
)
def test_the_reason_is_told(forecasts, first, why):
    assert choose(forecasts) == (forecasts[0] if first else None, why)


@pytest.mark.parametrize(
    "meshes", [[{"data": 2}, {"spatial": 4}, {"data": 4}], [{"data": 4}, {"spatial": 4}, {"pipeline": 4}]]
)
def test_of_equally_fast_ones_fewer_gpus_are_taken_and_then_replicas(meshes):
    best, *others = [forecast(1.0, **mesh) for mesh in meshes]
    assert choose([*others, best])[0] is best


def test_what_comes_so_near_to_all_memory_that_it_may_not_fit_is_chosen_where_nothing_else_runs():
    near, sure = forecast(0.2, 15.5, spatial=2), forecast(0.3, 14, spatial=2, checkpoint="all")
    chosen, why = choose([near, sure], 16 * GIB)
    assert chosen is sure
    assert "is the fastest that surely fits: 300 ms" in why
    assert "spatial: 2 takes 200 ms and 15.5 GiB of each GPU, so near to all of it that it may not fit (14.0" in why
    chosen, why = choose([near, judge(forecast(0.3, 17), 16 * GIB)], 16 * GIB)
    assert chosen is near
    assert why.endswith("(15.5 GiB of each GPU, so near to all of it that it may not fit)")
    assert choose([near, sure])[0] is near, "without a limit all are sure"


def test_what_may_not_fit_is_relieved_and_bounds_nothing():
    """A step of 15.5 of 16 GiB was out of memory on GPUs: what recomputes is slower, and is looked for all the same."""
    cost = {None: (0.2, 15.5), "all": (0.3, 6)}

    def follow(candidate):
        seconds, gib = cost[candidate.checkpoint]
        return forecast(seconds, gib, **vars(candidate))

    found = search([Candidate()], follow, 16 * GIB, 1, lambda _: [Candidate(checkpoint="all")])
    assert found.chosen is not None
    assert found.chosen.candidate.checkpoint == "all"
    roomy = search([Candidate()], follow, 20 * GIB, 1, lambda _: [Candidate(checkpoint="all")])
    assert [each.candidate.checkpoint for each in roomy.forecasts] == [None], "nothing to relieve"


@pytest.mark.parametrize(("more_than", "is_relieved"), [(16 * GIB, True), (64 * 16 * GIB, False)])
def test_what_no_number_of_gpus_could_hold_is_not_recomputed(more_than, is_relieved):
    """An estimate that was given up at the GPU's memory is relieved; one that was given up at 64 times of it is not."""

    def follow(candidate):
        if candidate.checkpoint is None:
            return Estimate(candidate=candidate, refused="needs more", more_than=more_than)
        return forecast(0.3, 6, **vars(candidate))

    found = search([Candidate()], follow, 16 * GIB, 1, lambda _: [Candidate(checkpoint="all")])
    assert (found.chosen is not None) is is_relieved


@pytest.mark.parametrize(("needed", "fits"), [(16 * GIB, True), (16 * GIB + 1, False)])
def test_what_needs_all_the_memory_fits(needed, fits):
    memory = MemoryUse(used=1, reserved=needed - 1, outside=1, peak_in="step")
    assert judge(Estimate(candidate=Candidate(), memory=memory, seconds=1.0), 16 * GIB).runs is fits


def test_a_pipeline_is_bound_by_filling_it():
    known = [forecast(1.0, kernels="torch")]
    bound = partial(compute_lower_bound, known=known, batch_size=8)
    # 8 rounds, and 3 until all 4 stages work, each of a quarter of an eighth.
    assert bound(Candidate(pipeline=4, split_size=1, kernels="torch")) == pytest.approx(11 / 8 / 4)
    assert bound(Candidate(data=4, kernels="torch")) == pytest.approx(1 / 4)
    assert bound(Candidate(spatial=4, kernels="fast")) == 0, "other kernels may be faster"
    eager = [Estimate(candidate=Candidate(kernels="torch"), seconds=0.01, host_forward_seconds=1.0)]
    pipeline = Candidate(pipeline=4, split_size=2, kernels="torch")
    assert compute_lower_bound(pipeline, eager, 8) == 4 * 2.4, "Python starts four micro-batches"
    assert compute_lower_bound(replace(pipeline, recorded=True), eager, 8) == 0


seconds = st.floats(0.01, 10)


@given(
    data=st.data(),
    num_gpus=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 9),
    kernels=st.sampled_from([("torch",), ("fast",)]),
    capacity=st.integers(1, 40),
)
def test_what_is_not_followed_would_not_have_won(data, num_gpus, batch, kernels, capacity):
    """On any costs that keep the bounds, the search chooses as if everything had been followed.

    Recomputation is for what does not fit, so other kernels that it needs are no faster here than it is slower.
    """
    free = Freedom(kernels=kernels)
    candidates = list_candidates(num_gpus, batch, (64, 64, 64), free)
    fast = data.draw(seconds, label="fast")
    alone = {"fast": fast, "torch": fast * data.draw(st.floats(0.1, 1.3), label="torch / fast")}
    extra = data.draw(st.dictionaries(st.integers(0, 40), st.floats(1, 3), max_size=20))
    levels = {None: 0, 1: 1, 2: 2, 3: 3, "all": 4, "tiled": 5}
    followed = []

    def follow(candidate):
        followed.append(candidate)
        return cost(candidate)

    def time_plain(candidate):
        """Without recomputation: one GPU's time as drawn, all others no less than it allows."""
        alone_candidate = Candidate(kernels=candidate.kernels, recorded=candidate.recorded)
        if candidate == alone_candidate:
            return alone[candidate.kernels]
        known = [Estimate(candidate=alone_candidate, seconds=alone[candidate.kernels])]
        return compute_lower_bound(candidate, known, batch) * extra.get(number_of(candidate), 1.0)

    def cost(candidate):
        recomputed = 1 + 0.3 * levels[candidate.checkpoint]
        gib = 60 / candidate.num_gpus * extra.get(40 - number_of(candidate), 1.0) / recomputed
        return forecast(time_plain(replace(candidate, checkpoint=None)) * recomputed, gib, **vars(candidate))

    def number_of(candidate):
        return (candidate.data * 5 + candidate.spatial * 3 + candidate.pipeline + (candidate.split_size or 0)) % 41

    def relieved(candidate):
        return relieve(candidate, free)

    found = search(candidates, follow, capacity * GIB, batch, relieved)
    num_followed = len(followed)
    thorough = search(candidates, follow, capacity * GIB, batch, relieved, thorough=True)
    assert num_followed == len(found.forecasts)
    assert thorough.skipped == ()
    assert (found.chosen is None) == (thorough.chosen is None)
    if found.chosen is not None:
        assert found.chosen.seconds == thorough.chosen.seconds

    def give_up(candidate):
        whole = judge(cost(candidate), capacity * GIB)
        if whole.runs or candidate.num_gpus == 1 or extra.get(40 - number_of(candidate), 1.0) > 1.5:
            return whole  # not everything is known early not to fit
        return Estimate(candidate=candidate, refused="needs more", more_than=capacity * GIB)

    early = search(candidates, give_up, capacity * GIB, batch, relieved)
    assert early.chosen == found.chosen


def test_where_ways_were_given_up_none_is_said_to_be_the_least():
    forecasts = [
        judge(forecast(gib=40), 16 * GIB),
        Estimate(candidate=Candidate(data=2), refused="needs more", more_than=16 * GIB),
        Estimate(candidate=Candidate(data=2, checkpoint="all"), refused="needs more", more_than=16 * GIB),
        Estimate(candidate=Candidate(spatial=2, checkpoint="all"), refused="needs more", more_than=16 * GIB),
    ]
    assert choose(forecasts)[1] == "nothing fits: one GPU needs 40.0 GiB, and there are 16.0 GiB"
    assert guess_least(forecasts).candidate == Candidate(data=2, checkpoint="all")
    assert guess_least(forecasts[:1]) is None


# Which candidates there are.


def names(*arguments, **freedom):
    return [name_candidate(each) for each in list_candidates(*arguments, Freedom(**freedom))]


def test_one_gpu_leaves_its_kernels_open():
    found = list_candidates(1, 2, (64, 64, 64), Freedom(kernels=("fast", "torch")))
    assert [(each.num_gpus, each.kernels) for each in found] == [(1, "fast")]


def test_four_gpus_deal_samples_cut_volumes_and_lay_out_layers():
    assert names(4, 8, (64, 64, 64)) == [
        "one GPU",
        "data: 4",
        "data: 2, spatial: 2",
        "spatial: 4",
        "data: 2, pipeline: 2, split_size: 1",
        "data: 2, pipeline: 2, split_size: 2",
        "pipeline: 4, split_size: 1",
        "pipeline: 4, split_size: 2",
        "pipeline: 4, split_size: 4",
    ]


@pytest.mark.parametrize(
    ("num_gpus", "batch", "freedom", "expected"),
    [
        # Three samples keep three of four GPUs busy.
        (4, 3, {"pipeline": 1}, ["data: 3", "data: 2, spatial: 2", "spatial: 4"]),
        (4, 1, {"pipeline": 1}, ["spatial: 4"]),
        (2, 4, {"spatial": 2}, ["spatial: 2"]),
        (4, 4, {"data": 2, "pipeline": 2}, ["data: 2, pipeline: 2, split_size: 1"]),
        (2, 4, {"pipeline": 2, "split_size": 3}, ["pipeline: 2, split_size: 3"]),
        (2, 4, {"spatial": 1, "data": 1, "split_size": 64}, ["pipeline: 2, split_size: 4"]),
        (2, 8, {"one_process": True, "pipeline": 1}, ["spatial: 2"]),
        # Replicas of a pipeline have two samples each, or their stages wait for each other, unless that is asked for.
        (4, 3, {"spatial": 1, "data": 2}, []),
        (4, 2, {"data": 2, "pipeline": 2}, ["data: 2, pipeline: 2, split_size: 1"]),
        (8, 8, {"spatial": 1, "data": 4}, ["data: 4, pipeline: 2, split_size: 1"]),
    ],
)
def test_what_was_decided_stays(num_gpus, batch, freedom, expected):
    found = list_candidates(num_gpus, batch, (64, 64, 64), Freedom(**freedom))
    assert [name_candidate(each) for each in found if each.num_gpus > 1] == expected


def test_no_candidate_takes_more_than_there_is():
    assert "spatial: 8" not in names(8, 1, (4, 4, 4)), "a volume has no more slabs than planes"
    for num_gpus in range(1, 9):
        for batch in range(1, 9):
            found = list_candidates(num_gpus, batch, (64, 64, 64), Freedom())
            assert all(each.num_gpus <= num_gpus for each in found)
            assert all(each.data <= batch for each in found)
            assert len(set(found)) == len(found)


def test_one_process_records_no_step_over_several_of_its_gpus():
    found = list_candidates(2, 2, (64, 64, 64), Freedom(one_process=True))
    recorded = {name_candidate(each): each.recorded for each in found}
    assert recorded == {"one GPU": True, "spatial: 2": False, "pipeline: 2, split_size: 1": True}


def test_relief_recomputes_more_and_more():
    relieved = relieve(Candidate(spatial=2), Freedom())
    assert [each.checkpoint for each in relieved] == [1, 2, 3, "all", "tiled"]
    assert {(each.spatial, each.kernels) for each in relieved} == {(2, "fast")}


@pytest.mark.parametrize("candidate", [Candidate(pipeline=2), Candidate(checkpoint="all")])
def test_what_cannot_recompute_is_not_relieved(candidate):
    assert relieve(candidate, Freedom()) == []


def test_names_are_a_configs_words():
    candidate = Candidate(data=2, spatial=2, checkpoint="all", kernels="torch")
    assert name_candidate(candidate, kernels=True) == "data: 2, spatial: 2, checkpoint: all, torch kernels"


# The largest volume that fits.


SHAPES = {
    "aspect": st.sampled_from([(1, 1, 1), (32, 48, 32), (512, 512, 320)]),
    "divisors": st.sampled_from([(16, 16, 16), (8, 8, 8), (32, 32, 4)]),
}
NEEDS = {
    **SHAPES,
    "fixed": st.integers(0, 2**30),
    "per_voxel": st.floats(50, 5000),
    "power": st.sampled_from([0.98, 1.0, 1.02]),
    "capacity": st.integers(2**28, 2**35),
    "voxels": st.integers(1, 2**26),
}


def check(need, find_total, capacity, aspect, divisors, voxels, most):
    """Look for a larger size that fits; the search may look at ``most`` sizes, each of which takes a second."""
    asked = []

    def ask(sides):
        asked.append(sides)
        return need(sides)

    found = find_largest(ask, capacity, aspect, divisors, voxels=voxels)
    # Larger sizes need more, so one that fits below a neighbour that does not is the largest.
    longest = max(range(3), key=lambda axis: (aspect[axis], divisors[axis]))
    step = 0 if found is None else found.sides[longest] // divisors[longest]
    sides, limit = (scale_sides(each, aspect, divisors) for each in (step, step + 1))
    assert find_total(limit) > capacity
    if found is not None:
        assert found == Largest(sides=sides, needed=find_total(sides), limit=limit)
        assert found.needed <= capacity
    assert len(asked) <= most


@given(**NEEDS, piece=st.sampled_from([1, 2**21, 2**25]), stops=st.floats(1, 2))
def test_no_larger_size_fits(aspect, divisors, fixed, per_voxel, power, capacity, voxels, piece, stops):
    """Memory that grows with the voxels, nearly in proportion, in whole pieces; a trace stops far above the limit."""

    def find_total(sides):
        return math.ceil((fixed + per_voxel * math.prod(sides) ** power) / piece) * piece

    def need(sides):
        total = find_total(sides)
        return total if total <= stops * capacity else math.inf

    check(need, find_total, capacity, aspect, divisors, voxels, most=20)


@given(**NEEDS)
def test_lines_may_miss_while_torch_gives_back_what_it_can(aspect, divisors, fixed, per_voxel, power, capacity, voxels):
    """Near the capacity all that there is is taken, by sizes that fit: lines through it went anywhere."""

    def need(sides):
        own = int(fixed + per_voxel * math.prod(sides) ** power)
        squeezed = own * 1.1 <= capacity
        return min(int(own * 1.4), capacity) if squeezed else int(own * 1.4)

    check(need, need, capacity, aspect, divisors, voxels, most=20)


@given(**SHAPES, step=st.integers(1, 60))
def test_sizes_are_ones_that_the_network_takes_and_grow(step, aspect, divisors):
    sides, larger = (scale_sides(each, aspect, divisors) for each in (step, step + 1))
    assert all(side % divisor == 0 for side, divisor in zip(sides, divisors, strict=True))
    assert all(side <= long for side, long in zip(sides, larger, strict=True))
    assert math.prod(sides) < math.prod(larger)


def test_sizes_that_cannot_be_run_are_too_small():
    def need(sides):
        return None if sides[0] < 32 else sides[0] * 10

    found = find_largest(need, 640, (1, 1, 1), (16, 16, 16))
    assert found == Largest(sides=(64, 64, 64), needed=640, limit=(80, 80, 80))
