"""Forecasts that were wrong: results remembered of other arguments, passes that there are none of, refused steps."""

import pytest
import torch
from torch import nn
from torch.library import Library, register_fake

from tests.following import follow
from volseg.device.torch_internals import get_storage_key
from volseg.estimate.candidate import Candidate
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.fake_step import operator_cache
from volseg.estimate.fake_step.operator_cache import OperatorCache
from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.instances import get_links
from volseg.estimate.network_plan import describe_network
from volseg.estimate.trace import KernelRun

V100, H200 = find_kind("v100-16"), find_kind("h200")
aten = torch.ops.aten


def share_memory(one, other):
    return get_storage_key(one.untyped_storage()) == get_storage_key(other.untyped_storage())


@pytest.fixture
def second():
    """An operator that views its second tensor, and does not say so: none of torch's is sure to do so for good."""
    library = Library("aten", "FRAGMENT")
    library.define("volseg_test_second(Tensor first, Tensor second) -> Tensor")
    register_fake("aten::volseg_test_second", lambda first, second: second.view(-1), lib=library)
    yield aten.volseg_test_second.default
    library._destroy()


def test_a_view_of_the_second_of_two_tensors_that_share_memory_is_not_remembered_as_one_of_the_first(
    monkeypatch, second
):
    monkeypatch.setattr(operator_cache, "_known", {})
    with tracing(V100) as followed:
        known = OperatorCache(followed.mode)
        whole = torch.empty(4, 4)
        shared = known.run(second, (whole, whole.view(4, 4)), {})
        assert share_memory(shared, whole)
        apart = torch.empty(4, 4), torch.empty(4, 4)
        viewed = known.run(second, apart, {})
        assert share_memory(viewed, apart[1])
        assert not share_memory(viewed, apart[0])


def test_a_tensor_that_was_given_twice_is_not_remembered_as_the_first(monkeypatch):
    monkeypatch.setattr(operator_cache, "_known", {})
    with tracing(V100) as followed:
        known = OperatorCache(followed.mode)
        one, other = torch.empty(4), torch.empty(4)
        assert known.run(aten.mul_.Tensor, (one, one), {}) is one
        assert known.run(aten.mul_.Tensor, (other, one), {}) is other


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of a switch that is set with the others
def test_what_torchs_switches_choose_is_not_remembered_for_others(monkeypatch):
    """oneDNN lays a convolution's output out with channels last; without it the same operator does not."""
    monkeypatch.setattr(operator_cache, "_known", {})
    with tracing(V100) as followed:
        known = OperatorCache(followed.mode)
        volume = torch.empty(2, 4, 8, 8, 8).to(memory_format=torch.channels_last_3d)
        asked = volume, torch.empty(4, 4, 3, 3, 3), None, (1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1
        strides = []
        for enabled in (True, False):
            with torch.backends.mkldnn.flags(enabled=enabled):
                plain = aten.convolution.default(*asked)
                strides.append(plain.stride())
                assert known.run(aten.convolution.default, asked, {}).stride() == plain.stride()
    assert torch.backends.mkldnn.is_available() == (len(set(strides)) == 2), "or this tells nothing"


def test_a_view_by_another_name_is_no_pass_over_memory_and_what_is_filled_is_not_read():
    def run(followed):
        volume = followed.empty(4, 1024)
        followed.mark("step")
        aten._unsafe_view.default(volume, [1024, 4])
        aten.unsafe_split.Tensor(volume, 2)
        volume.unsqueeze_(0)
        volume.new_zeros(16)
        torch.ones_like(volume[0, 0, :8])

    (trace,) = follow(run, gpu=V100)
    runs = [event for event in trace.events if isinstance(event, KernelRun)]
    assert [(event.name, event.bytes_moved) for event in runs] == [("aten.new_zeros", 64), ("aten.ones_like", 32)]


def test_a_step_that_would_not_be_recorded_is_forecast_as_it_runs_then():
    """SGD reads the rate, which a recording has on the GPU: a training went on without, and its plan had nothing."""
    net = nn.Conv3d(1, 2, 3, padding=1)

    def plan_for(*, fused):
        recorded = Candidate(kernels="torch", recorded=True)
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)  # noqa: E731
        work = describe_network(net, (1, 1, 16, 16, 16), dtype=torch.bfloat16, optimizer=optimizer)
        machine = Machine(gpu=H200, num_gpus=1, links=get_links(H200), gpu_bytes=2**37)
        return Planned(work=work, machine=machine).follow(recorded)

    eager, fused = plan_for(fused=None), plan_for(fused=True)
    assert eager.refused is fused.refused is None
    assert not eager.candidate.recorded
    assert fused.candidate.recorded
    assert eager.host_seconds > fused.host_seconds
