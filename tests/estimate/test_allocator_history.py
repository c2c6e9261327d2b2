"""The model of torch's allocator against accounts that the real one gave on an H200 (torch 2.11), block by block."""

import gzip
import json
from pathlib import Path

import pytest

from volseg.estimate.allocator import Allocator

ACCOUNTS = json.loads(gzip.decompress((Path(__file__).parent / "data" / "h200_accounts.json.gz").read_bytes()))
"""By configuration of ``workflows/benchmarks/plan_accuracy.py``: what the allocator was asked for in its first steps,
and when it took segments from the device and gave them back."""


def list_events(account):
    """Yield action, address, size, stream and owner of each event."""
    columns = (account[key] for key in ("action", "address", "size", "stream"))
    events = [
        (account["actions"][action], account["addresses"][place], size, stream)
        for action, place, size, stream in zip(*columns, strict=True)
    ]
    # The driver gives an address again: a recording's segment is the last that was taken there.
    taken = {address: number for number, (action, address, *_) in enumerate(events) if action == "segment_alloc"}
    recordings = [(taken[begin], begin, begin + size) for begin, size in account["recordings"]]
    for number, event in enumerate(events):
        is_recorded = any(since < number and begin <= event[1] < end for since, begin, end in recordings)
        yield *event, "recording" if is_recorded else ""


def replay(allocator, events):
    """Ask a model for the same; yield the address of each block, and what the real one had reserved then."""
    reserved = 0
    for number, (action, address, size, stream, owner) in enumerate(events):
        if action == "segment_alloc":
            reserved += size
        elif action == "segment_free":
            reserved -= size
            if events[number + 1][0] != "segment_free":
                allocator.empty_cache()
        elif action == "alloc":
            allocator.take(address, size, stream, owner)
            yield address, reserved
        elif action == "free_completed":
            allocator.give_back(address)


@pytest.mark.parametrize("name", ACCOUNTS)
def test_every_block_lies_where_the_real_one_did(name):
    """Told where the driver put each segment, the model takes the same ones at the same time, and the same pieces."""
    events = list(list_events(ACCOUNTS[name]))
    driver = iter([address for action, address, *_ in events if action == "segment_alloc"])
    allocator, blocks = Allocator(place=lambda size: next(driver)), 0
    for address, reserved in replay(allocator, events):
        assert (allocator.find_block(address)[0], allocator.reserved) == (address, reserved), f"block {blocks}"
        blocks += 1
    assert blocks > 1000
    assert next(driver, None) is None


@pytest.mark.parametrize("name", ACCOUNTS)
def test_what_is_reserved_at_falling_addresses_is_what_was(name):
    """Untold where the driver puts segments. Two thousandths are for holes above, which it fills with small ones."""
    allocator = Allocator()
    peak = max(reserved for _, reserved in replay(allocator, list(list_events(ACCOUNTS[name]))))
    assert allocator.peak_reserved == pytest.approx(peak, rel=0.002)
