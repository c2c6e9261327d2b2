"""Pieces of work share an amount, such as memory."""

from threading import Barrier, Lock

import pytest

from volseg.data.threads import Allowance, map_in_threads


def test_pieces_that_fit_run_together():
    allowance, meeting = Allowance(10), Barrier(2, timeout=60)

    def work(amount):
        with allowance.taken(amount):
            meeting.wait()  # breaks unless both are inside
        return amount

    assert list(map_in_threads(work, [5, 5], workers=2)) == [5, 5]


def test_no_more_is_taken_than_there_is_but_by_one_alone():
    allowance, lock, inside, seen = Allowance(10), Lock(), [], []

    def work(amount):
        with allowance.taken(amount):
            with lock:
                inside.append(amount)
                seen.append(list(inside))
            with lock:
                inside.remove(amount)

    list(map_in_threads(work, [6, 6, 3, 25, 0, 4, 4, 11, 1] * 20, workers=8))
    assert all(sum(amounts) <= 10 or len([amount for amount in amounts if amount]) == 1 for amounts in seen)
    assert len(seen) == 180


def test_what_fails_gives_back_what_it_took():
    allowance = Allowance(10)
    with pytest.raises(ValueError, match="odd"), allowance.taken(10):
        raise ValueError("odd")
    with allowance.taken(10):
        pass
