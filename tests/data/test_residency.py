"""Which cases lie on the device."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from volseg.data.case_store.volume_cache import choose_budget, choose_resident


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), budget=st.integers(-1, 200))
def test_no_other_choice_within_the_budget_holds_more_cases(sizes, budget):
    chosen = choose_resident(sizes, budget)
    within = [
        sum(other)
        for other in product([False, True], repeat=len(sizes))
        if sum(size for size, there in zip(sizes, other, strict=True) if there) <= max(budget, 0)
    ]
    assert sum(size for size, there in zip(sizes, chosen, strict=True) if there) <= max(budget, 0)
    assert sum(chosen) == max(within)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), budget=st.integers(0, 200), more=st.integers(0, 50))
def test_more_room_sends_no_case_away(sizes, budget, more):
    for before, after in zip(choose_resident(sizes, budget), choose_resident(sizes, budget + more), strict=True):
        assert after or not before


@given(free=st.integers(0, 2**40), limit=st.none() | st.integers(0, 2**40))
def test_a_budget_is_never_more_than_there_is(free, limit):
    assert 0 <= choose_budget(free, limit) <= free
