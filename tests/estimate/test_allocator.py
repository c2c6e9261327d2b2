"""The model of torch's allocator: sequences derived by hand from its rules, and invariants of all sequences."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volseg.errors import ConfigError, OutOfMemoryError
from volseg.estimate.allocator import VARIABLES, Allocator, has_expandable_segments
from volseg.estimate.step_memory import compute_memory_use, repeat_last_step
from volseg.estimate.trace import Allocate, Free, Mark, StepTrace, Used

MIB = 2**20


def taking(*sizes, expands=False, capacity=None):
    """Return an allocator that has given out blocks 0, 1, ... of these sizes."""
    allocator = Allocator(expands, capacity)
    for name, size in enumerate(sizes):
        allocator.take(name, size)
    return allocator


def test_the_cache_is_given_back_where_the_device_has_no_more_but_not_by_a_recording():
    allocator = taking(60 * MIB, 20 * MIB, capacity=100 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"62,914,560 bytes are asked for, and of the device's 104,857,600"):
        allocator.take("more", 60 * MIB)
    allocator.give_back(0)
    with pytest.raises(OutOfMemoryError):
        allocator.take("recorded", 80 * MIB, owner="step")
    allocator.take("more", 80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (100 * MIB, 100 * MIB)


def test_an_expandable_segment_grows_by_pages_and_leaves_no_gaps():
    allocator = taking(30 * MIB, expands=True)
    assert allocator.reserved == 40 * MIB
    allocator.take("more", 30 * MIB)
    assert allocator.reserved == 60 * MIB, "10 MiB were left of the second page"
    for name in (0, "more"):
        allocator.give_back(name)
    allocator.take("all", 60 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.take("small", 512)
    assert allocator.reserved == 62 * MIB


def test_free_pages_at_the_end_of_an_expandable_segment_are_given_back():
    allocator = taking(30 * MIB, 50 * MIB, expands=True)
    allocator.give_back(1)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB, "the first block ends in the second page"
    allocator.take("back", 25 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.give_back(0)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB, "free pages before a block in use stay"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", False), ("expandable_segments:True", True), (" backend:native , expandable_segments:False", False)],
)
def test_settings_are_read(text, expected, monkeypatch):
    monkeypatch.setenv(VARIABLES[0], text)
    assert has_expandable_segments() is expected


@pytest.mark.parametrize(
    "text", ["roundup_power2_divisions:4", "backend:cudaMallocAsync", "max_split_size_mb:128", "expandable_segments:1"]
)
def test_settings_that_are_not_modelled_are_refused(text, monkeypatch):
    monkeypatch.setenv(VARIABLES[0], text)
    with pytest.raises(ConfigError, match=text):
        has_expandable_segments()


def test_a_trace_gives_its_peaks_and_where_they_were():
    events = [Allocate(0, 30 * MIB), Mark("forward"), Allocate(1, 10 * MIB), Mark("backward"), Free(1)]
    events += [Allocate(2, 40 * MIB), Free(2), Mark("empty_cache"), Mark("optimizer"), Allocate(3, 5 * MIB)]
    use = compute_memory_use(StepTrace(tuple(events)), outside=512 * MIB)
    assert (use.used, use.reserved, use.peak_in) == (70 * MIB, 80 * MIB, "backward")
    assert use.total == 592 * MIB


def test_a_trace_that_does_not_fit_says_where():
    events = (Allocate(0, 30 * MIB), Mark("forward"), Allocate(1, 30 * MIB))
    with pytest.raises(OutOfMemoryError, match=r"out of memory in forward \(event 2 of the trace\)"):
        compute_memory_use(StepTrace(events), capacity=60 * MIB, outside=10 * MIB)


@pytest.mark.parametrize(
    ("is_ahead", "last", "expected"), [(False, "end", 40), (True, "end", 80), (True, "empty_cache", 80)]
)
def test_a_block_that_two_streams_use_comes_back_at_the_end_of_the_step_where_python_is_ahead(is_ahead, last, expected):
    """Whoever leaves a block uses it no more, and it is reserved; then it is as free as any other."""
    one, two, three = (Allocate(block, 40 * MIB) for block in (1, 2, 3))
    events = (one, Used(1), Free(1), two, Free(2), Mark(last), three)
    use = compute_memory_use(StepTrace(events), is_ahead=is_ahead)
    assert (use.used, use.reserved) == (40 * MIB, expected * MIB)


def make_steps(count):
    """Return steps that each free a gradient of the step before, share a block with a stream, and are validated."""
    events = [Allocate(1, 4 * MIB), Mark("placed")]
    gradient, block = None, 1
    for _ in range(count):
        events.append(Mark("step"))
        events += [] if gradient is None else [Free(gradient)]
        activation, sent, gradient = block + 1, block + 2, block + 3
        block = gradient
        events += [Allocate(activation, 8 * MIB), Allocate(sent, MIB, stream=1), Used(sent), Free(sent)]
        events += [Allocate(gradient, 2 * MIB), Free(activation), Mark("end")]
    return [*events, Mark("validate"), Allocate(block + 1, 512), Free(gradient), Free(block + 1)]


def list_requests(events):
    """Return the requests to a device, with blocks in order of allocation."""
    order, asked = {}, []
    for event in events:
        match event:
            case Allocate(block, size, stream):
                asked.append((order.setdefault(block, len(order)), size, stream))
            case Free(block) | Used(block):
                asked.append((type(event), order[block]))
            case Mark(name):
                asked.append(name)
    return asked


@pytest.mark.parametrize("steps", [2, 3])
def test_a_step_is_repeated_with_what_comes_behind_it(steps):
    assert list_requests(repeat_last_step(make_steps(steps))) == list_requests(make_steps(steps + 1))


def test_what_cannot_be_told_is_not_repeated():
    events = [Allocate(1, MIB), Mark("step"), Allocate(2, 2 * MIB), Free(1), Mark("end")]
    assert repeat_last_step(events) == events


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 64 * MIB) | st.integers(1, 4 * MIB) | st.integers(1, 4096),
        st.integers(0, 1),
        st.sampled_from(["", "step"]),
        st.integers(0, 40) | st.none(),
    ),
    max_size=60,
)


@pytest.mark.parametrize("expands", [False, True])
@given(requests=REQUESTS)
def test_whatever_is_asked_for(expands, requests):
    """Blocks are large enough and never overlap, and all freed memory can return to the device."""
    allocator, sizes = Allocator(expands), {}
    for name, (size, stream, owner, leaving) in enumerate(requests):
        allocator.take(name, size, stream, owner)
        sizes[name] = size
        if leaving in sizes:
            allocator.give_back(leaving)
            del sizes[leaving]
        if size % 5 == 0:
            allocator.empty_cache()
        blocks = sorted(allocator.find_block(one) for one in sizes)
        ends = [address + length for address, length in blocks]
        assert all(end <= begin for end, (begin, _) in zip(ends, blocks[1:], strict=False))
        assert all(allocator.find_block(one)[1] >= wanted for one, wanted in sizes.items())
        assert allocator.used == sum(length for _, length in blocks)
        assert allocator.used <= allocator.reserved <= allocator.peak_reserved
    for name in sizes:
        allocator.give_back(name)
    allocator.empty_cache()
    recorded = sum(owner != "" for _, _, owner, _ in requests)
    assert allocator.used == 0
    assert (allocator.reserved == 0) == (recorded == 0)


# Against accounts that the real allocator gave on an H200 (torch 2.11), block by block.


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
    """Replay the requests on a model; yield each block's address, and the real reserved memory then."""
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
    """Given the driver's segment addresses, the model chooses the same segments and blocks."""
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
