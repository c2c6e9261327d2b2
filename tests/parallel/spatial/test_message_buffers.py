"""Message buffers are reused on the same stream, and never by two messages at a time."""

import pytest
import torch

from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Allocate, Free
from volseg.parallel.spatial.transport.message_buffers import MessageBuffers, Messages

HERE = torch.device("cpu")


def test_what_was_sent_and_waited_for_is_lent_again():
    buffers = MessageBuffers(HERE)
    first = buffers.lend(5000)
    other = buffers.lend(5000)
    assert first.data_ptr() != other.data_ptr()
    buffers.take_back([first])
    assert buffers.lend(5000).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000, 2**20 + 1, 3 * 2**20])
def test_messages_of_many_sizes_share_a_few(size):
    lent = MessageBuffers(HERE).lend(size).numel()
    assert size <= lent <= max(512 * -(-size // 512), size * 5 / 4)


def test_messages_hold_what_was_packed():
    planes = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    messages = Messages(HERE, MessageBuffers(HERE), None, int)
    assert messages.make_room((4, 3, 2), torch.float32).copy_(planes).equal(planes)


def test_on_a_gpu_messages_stay_in_memory_of_their_own():
    with tracing(find_kind("h200")) as followed:
        (gpu,) = followed.devices
        buffers, activation = MessageBuffers(gpu), followed.empty(2, 8, 4, 64, 64)
        for _ in range(3):
            messages = Messages(gpu, buffers, None, int)
            packed = messages.pack(activation.narrow(2, 0, 1))
            assert packed.is_contiguous()
            messages.make_room(packed.shape, packed.dtype)
            del packed
            messages.end()
        (trace,) = followed.traces()
        own = [event for event in trace.events if isinstance(event, Allocate) and event.pool == "messages"]
        assert len(own) == 2
        assert not any(isinstance(event, Free) for event in trace.events)


def test_while_a_graph_is_recorded_messages_come_and_go():
    with tracing(find_kind("h200")) as followed:
        messages = Messages(followed.devices[0], None, None, int)
        planes = followed.empty(2, 3)
        assert messages.pack(planes).untyped_storage()._cdata != planes.untyped_storage()._cdata
        messages.end()
