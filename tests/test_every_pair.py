"""Of several things that a test is run with, every two meet by default, and no combination is lost."""

from itertools import combinations, product

import pytest
from every_pair import every_pair, select_pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((3, 3, 2), 9), ((2, 2), 4), ((2, 3, 2), 6), ((5,), 5), ((4, 3, 2, 2), 14)]
)
def test_every_two_values_meet_in_few_rows(sizes, most):
    rows = select_pairs(sizes)
    for one, other in combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(range(sizes[one]), range(sizes[other])))
    assert {row[0] for row in rows} == set(range(sizes[0]))
    assert len(rows) == len(set(rows)) <= most


def test_the_other_combinations_are_slow():
    found = every_pair(["a", "b", "c"], [1, 2, 3], [True, False], ids=["abc", "123", ["yes", "no"]])
    assert [each.values for each in found] == list(product("abc", [1, 2, 3], [True, False]))
    assert found[1].id == "a-1-no"
    assert sum(not each.marks for each in found) == 9
    assert all(mark.name == "slow" for each in found for mark in each.marks)
