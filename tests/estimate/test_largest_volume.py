"""The largest volume that fits, against trying one size after the other."""

import math

from hypothesis import given
from hypothesis import strategies as st

from volseg.estimate.largest_volume import Largest, Need, find_largest, scale_sides

ASPECTS = [(1, 1, 1), (32, 48, 32), (512, 512, 320)]
DIVISORS = [(16, 16, 16), (8, 8, 8), (32, 32, 4)]


@given(
    aspect=st.sampled_from(ASPECTS),
    divisors=st.sampled_from(DIVISORS),
    fixed=st.integers(0, 2**30),
    per_voxel=st.floats(50, 5000),
    power=st.sampled_from([0.98, 1.0, 1.02]),
    piece=st.sampled_from([1, 2**21, 2**25]),
    capacity=st.integers(2**28, 2**35),
    first=st.integers(1, 40),
)
def test_the_largest_is_that_of_trying_all(aspect, divisors, fixed, per_voxel, power, piece, capacity, first):
    """Tensors that grow with the voxels, nearly in proportion, and memory for them, which comes in whole pieces."""
    asked = []

    def need(sides):
        asked.append(sides)
        held = math.ceil(fixed + per_voxel * math.prod(sides) ** power)
        return Need(total=math.ceil(held / piece) * piece, held=held)

    found = find_largest(need, capacity, aspect, divisors, first=first)
    num_asked = len(asked)
    step = 0
    while need(scale_sides(step + 1, aspect, divisors)).total <= capacity:
        step += 1
    if step == 0:
        assert found is None
        return
    sides = scale_sides(step, aspect, divisors)
    assert found == Largest(sides=sides, needed=need(sides).total, limit=scale_sides(step + 1, aspect, divisors))
    assert num_asked <= 14, "each is a second"


@given(
    aspect=st.sampled_from(ASPECTS),
    divisors=st.sampled_from(DIVISORS),
    fixed=st.integers(0, 2**30),
    per_voxel=st.floats(50, 5000),
    capacity=st.integers(2**28, 2**35),
    first=st.integers(1, 400),
    flat=st.floats(0.2, 1),
)
def test_the_largest_is_found_where_what_fails_is_not_followed_to_its_end(
    aspect, divisors, fixed, per_voxel, capacity, first, flat
):
    """Of what was given up nothing is known but that it fails; a line through what fits may lie far too low."""
    asked = []

    def find_total(sides):
        return math.ceil(fixed + per_voxel * math.prod(sides))

    def need(sides):
        total, is_first = find_total(sides), not asked
        asked.append(sides)
        if total > capacity and not is_first:
            return Need(total=capacity + 1, held=None)
        return Need(total=total, held=math.ceil(flat * total))

    found = find_largest(need, capacity, aspect, divisors, first=first)
    step = 0
    while find_total(scale_sides(step + 1, aspect, divisors)) <= capacity:
        step += 1
    if step == 0:
        assert found is None
        return
    sides, limit = (scale_sides(each, aspect, divisors) for each in (step, step + 1))
    assert found == Largest(sides=sides, needed=find_total(sides), limit=limit)
    assert len(asked) <= 20, "of 24 that are looked at"


@given(st.integers(1, 60), st.sampled_from(ASPECTS), st.sampled_from(DIVISORS))
def test_sizes_are_ones_that_the_network_takes_and_grow(step, aspect, divisors):
    sides, larger = (scale_sides(each, aspect, divisors) for each in (step, step + 1))
    assert all(side % divisor == 0 for side, divisor in zip(sides, divisors, strict=True))
    assert all(side <= long for side, long in zip(sides, larger, strict=True))
    assert math.prod(sides) < math.prod(larger)


def test_sizes_that_cannot_be_run_are_too_small():
    def need(sides):
        return None if sides[0] < 32 else Need(total=sides[0] * 10, held=math.prod(sides) // 1000)

    found = find_largest(need, 640, (1, 1, 1), (16, 16, 16))
    assert found == Largest(sides=(64, 64, 64), needed=640, limit=(80, 80, 80))


@given(
    aspect=st.sampled_from(ASPECTS),
    divisors=st.sampled_from(DIVISORS),
    fixed=st.integers(0, 2**30),
    per_voxel=st.floats(50, 5000),
    power=st.sampled_from([0.98, 1.0, 1.02]),
    capacity=st.integers(2**31, 2**35),
    first=st.integers(1, 40),
)
def test_what_is_held_says_where_to_look_while_torch_gives_back_what_it_can(
    aspect, divisors, fixed, per_voxel, power, capacity, first
):
    """Near the capacity all that there is is taken, by sizes that fit: lines through it went anywhere."""
    asked = []

    def need(sides):
        asked.append(sides)
        own = int(fixed + per_voxel * math.prod(sides) ** power)
        squeezed = own * 1.1 <= capacity
        return Need(total=min(int(own * 1.4), capacity) if squeezed else int(own * 1.4), held=own)

    found = find_largest(need, capacity, aspect, divisors, first=first)
    num_asked = len(asked)
    step = 0
    while need(scale_sides(step + 1, aspect, divisors)).total <= capacity:
        step += 1
    if step == 0:
        assert found is None
        return
    assert found is not None
    assert found.sides == scale_sides(step, aspect, divisors)
    assert found.limit == scale_sides(step + 1, aspect, divisors)
    assert num_asked <= 12, "each is a second"
