from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volseg.errors import PartitionError
from volseg.parallel.pipeline.balance import balance, pipeline_ms, quickest, sums
from volseg.parallel.pipeline.partition import LayerCost, Partition


def every_split(layers: int, stages: int):
    for cuts in combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        yield [b - a for a, b in pairwise(ends)]


LAYERS = st.lists(st.tuples(*[st.integers(0, 99)] * 3), min_size=1, max_size=7)


def phases(forward, backward, lengths):
    """Slowest forward and slowest backward stage."""
    return max(sums(forward, lengths)), max(sums(backward, lengths))


@given(layers=LAYERS, data=st.data())
def test_phases_take_the_least_of_all_cuts(layers, data):
    forward, backward, _ = zip(*layers, strict=True)
    stages = data.draw(st.integers(1, len(layers)))
    best = min(sum(phases(forward, backward, lengths)) for lengths in every_split(len(layers), stages))
    chosen = balance(forward, stages, backward)
    assert sum(phases(forward, backward, chosen)) == best
    assert min(chosen) >= 1
    assert sum(chosen) == len(layers)


@given(layers=LAYERS, data=st.data())
def test_limits_hold_and_memory_is_the_least_of_the_quick_cuts(layers, data):
    forward, backward, memory = zip(*layers, strict=True)
    stages = data.draw(st.integers(1, len(layers)))
    limits = data.draw(st.lists(st.integers(0, 300), min_size=stages, max_size=stages))
    tolerance = data.draw(st.sampled_from([0.0, 0.05, 0.5]))
    fitting = [
        lengths
        for lengths in every_split(len(layers), stages)
        if all(held <= limit for held, limit in zip(sums(memory, lengths), limits, strict=True))
    ]
    if not fitting:
        with pytest.raises(PartitionError, match="no cut into"):
            balance(forward, stages, backward, memory, limits, tolerance)
        return
    _, *quickest_phases = min((sum(found), *found) for found in (phases(forward, backward, each) for each in fitting))
    # As in the code: float sums may differ in their last bits.
    quick = [
        lengths
        for lengths in fitting
        if all(
            mine <= least * (1 + tolerance) * (1 + 1e-9)
            for mine, least in zip(phases(forward, backward, lengths), quickest_phases, strict=True)
        )
    ]
    chosen = balance(forward, stages, backward, memory, limits, tolerance)
    assert chosen in quick
    assert max(sums(memory, chosen)) == min(max(sums(memory, lengths)) for lengths in quick)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PartitionError, match=r"cannot split 2 layers into 3 non-empty stages; use 1 to 2 devices"):
        balance([1, 1], 3)


def test_impossible_memory_says_what_is_needed_and_had():
    with pytest.raises(
        PartitionError, match=r"even the most even one needs 3\.000 GiB .* have 1\.000, 1\.000 GiB; use more"
    ):
        balance([1, 1], 2, None, [3 * 2**30, 2**30], [2**30, 2**30])


def layer(name, ms, activations=0):
    return LayerCost(modules=(name,), forward_ms=ms / 3, backward_ms=2 * ms / 3, activation_bytes=activations)


def test_bound_is_fill_and_heaviest_stage():
    partition = Partition.from_lengths([layer(str(n), 1) for n in range(4)], [1, 1, 1, 1], ["cpu"] * 4, samples=2)
    assert partition.bound(13) == pytest.approx(13 * 4 / 16)


def test_table_names_the_layer_that_bounds_time_and_memory():
    layers = [layer("down", 1, 2**20), layer("up_tr32", 6, 8 * 2**20), layer("head", 1)]
    text = str(Partition.from_lengths(layers, [1, 2], ["cuda:0", "cuda:1"], samples=2))
    assert "up_tr32 ... head (2 calls)" in text
    assert "up_tr32 alone takes 75% of the time: layers cannot bring more than 1.33x" in text
    assert "up_tr32 alone keeps 89% of the activations" in text


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4), st.integers(1, 6))
def test_predicted_time_is_that_of_a_simulated_flow(stages, micro_batches):
    forward, backward = zip(*stages, strict=True)
    now = 0
    for phase in (forward, backward[::-1]):
        # The loss stands between: backward begins when all forwards have ended.
        free = [now] * len(stages)
        for _ in range(micro_batches):
            ready = 0
            for stage, ms in enumerate(phase):
                ready = free[stage] = max(ready, free[stage]) + ms
        now = free[-1]
    assert pipeline_ms(forward, backward, micro_batches) == now


def test_of_equal_times_the_largest_is_taken():
    assert quickest({2: 10.0, 1: 12.0, 4: 10.1}) == 4
