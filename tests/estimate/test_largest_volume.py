"""The largest volume that fits, against trying one size after the other."""

import math

from hypothesis import given
from hypothesis import strategies as st

from volseg.estimate.largest_volume import Largest, Need, find_largest, scale_sides

SHAPES = {
    "aspect": st.sampled_from([(1, 1, 1), (32, 48, 32), (512, 512, 320)]),
    "divisors": st.sampled_from([(16, 16, 16), (8, 8, 8), (32, 32, 4)]),
}
NEEDS = {**SHAPES, "fixed": st.integers(0, 2**30), "per_voxel": st.floats(50, 5000)}
POWERS = st.sampled_from([0.98, 1.0, 1.02])


def check(need, find_total, capacity, aspect, divisors, first, most):
    """Compare the search with trying all sizes; it may look at ``most`` sizes, each of which takes a second."""
    asked = []

    def ask(sides):
        asked.append(sides)
        return need(sides, is_first=len(asked) == 1)

    found = find_largest(ask, capacity, aspect, divisors, first=first)
    step = 0
    while find_total(scale_sides(step + 1, aspect, divisors)) <= capacity:
        step += 1
    if step == 0:
        assert found is None
        return
    sides, limit = (scale_sides(each, aspect, divisors) for each in (step, step + 1))
    assert found == Largest(sides=sides, needed=find_total(sides), limit=limit)
    assert len(asked) <= most


@given(
    **NEEDS,
    power=POWERS,
    piece=st.sampled_from([1, 2**21, 2**25]),
    capacity=st.integers(2**28, 2**35),
    first=st.integers(1, 40),
)
def test_the_largest_is_that_of_trying_all(aspect, divisors, fixed, per_voxel, power, piece, capacity, first):
    """Tensors that grow with the voxels, nearly in proportion, and memory for them, which comes in whole pieces."""

    def need(sides, is_first=False):
        held = math.ceil(fixed + per_voxel * math.prod(sides) ** power)
        return Need(total=math.ceil(held / piece) * piece, held=held)

    check(need, lambda sides: need(sides).total, capacity, aspect, divisors, first, most=14)


@given(**NEEDS, capacity=st.integers(2**28, 2**35), first=st.integers(1, 400), flat=st.floats(0.2, 1))
def test_the_largest_is_found_where_what_fails_is_not_followed_to_its_end(
    aspect, divisors, fixed, per_voxel, capacity, first, flat
):
    """Of what was given up nothing is known but that it fails; a line through what fits may lie far too low."""

    def find_total(sides):
        return math.ceil(fixed + per_voxel * math.prod(sides))

    def need(sides, is_first):
        total = find_total(sides)
        if total > capacity and not is_first:
            return Need(total=capacity + 1, held=None)
        return Need(total=total, held=math.ceil(flat * total))

    check(need, find_total, capacity, aspect, divisors, first, most=20)


@given(**NEEDS, power=POWERS, capacity=st.integers(2**31, 2**35), first=st.integers(1, 40))
def test_what_is_held_says_where_to_look_while_torch_gives_back_what_it_can(
    aspect, divisors, fixed, per_voxel, power, capacity, first
):
    """Near the capacity all that there is is taken, by sizes that fit: lines through it went anywhere."""

    def need(sides, is_first=False):
        own = int(fixed + per_voxel * math.prod(sides) ** power)
        squeezed = own * 1.1 <= capacity
        return Need(total=min(int(own * 1.4), capacity) if squeezed else int(own * 1.4), held=own)

    check(need, lambda sides: need(sides).total, capacity, aspect, divisors, first, most=12)


@given(**SHAPES, step=st.integers(1, 60))
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
