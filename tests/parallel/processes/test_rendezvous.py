"""The processes of an attempt find each other, even if earlier attempts left entries in the store."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from volseg.errors import ParallelError
from volseg.launched import Launch
from volseg.parallel.processes.rendezvous import join_rendezvous, open_store

LAUNCH = Launch(rank=0, local_rank=0, world_size=3, address="localhost", port=1, run="test")


def met(store, late=(), restarts=(0, 0, 0), **options):
    """Return the agreement of three processes; the late ones arrive when the others already wait."""
    places = [replace(LAUNCH, rank=rank, restarts=count) for rank, count in enumerate(restarts)]
    with ThreadPoolExecutor(3) as pool:
        order = sorted(places, key=lambda place: place.rank in late)
        waiting = []
        for place in order:
            if place.rank in late:
                with pytest.raises(TimeoutError):
                    waiting[0].result(timeout=0.3)
            waiting.append(pool.submit(join_rendezvous, store, place, {"pid": place.rank}, 20.0, **options))
        return [one.result() for one in waiting]


@pytest.mark.parametrize("late", [(), (0,), (2,), (0, 1), (1, 2)])
def test_all_agree_and_dead_members_of_earlier_attempts_are_no_members(late):
    store, names = dist.HashStore(), set()
    for attempt in range(2):
        agreed = met(store, late)
        names |= {rendezvous.name for rendezvous in agreed}
        assert len(names) == attempt + 1
        # Whatever the launchers counted: that of a machine which joins again does not count.
        assert {rendezvous.restarts for rendezvous in agreed} == {attempt}
        assert all([member["pid"] for member in rendezvous.members] == [0, 1, 2] for rendezvous in agreed)
        assert not agreed[2].store.check(["address"])
        agreed[0].store.set("address", "of a process")
        assert agreed[1].store.get("address") == b"of a process"


def test_the_highest_count_of_a_launcher_holds():
    assert {rendezvous.restarts for rendezvous in met(dist.HashStore(), restarts=(0, 3, 0))} == {3}


def test_to_meet_again_is_no_new_attempt():
    store = dist.HashStore()
    met(store)
    assert {rendezvous.restarts for rendezvous in met(store, first=False)} == {0}


def test_who_does_not_come_is_named():
    with pytest.raises(ParallelError, match=r"process 0 of 3 waited 0\.1 s for processes \[1, 2\] at localhost:1"):
        join_rendezvous(dist.HashStore(), LAUNCH, {}, 0.1)
    with pytest.raises(ParallelError, match=r"process 2 of 3 waited 0\.1 s for the others"):
        join_rendezvous(dist.HashStore(), replace(LAUNCH, rank=2), {}, 0.1)


def test_a_store_that_cannot_be_reached_is_named():
    with pytest.raises(ParallelError, match=r"process 1 of 3 cannot reach the job.s store at localhost:1 within 1 s"):
        open_store(replace(LAUNCH, rank=1), 1)
    with pytest.raises(ParallelError, match="no rendezvous address is set"):
        open_store(replace(LAUNCH, port=None), 1)
