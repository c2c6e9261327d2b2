"""Forecasts of trainings that were wrong or refused: batches on their way, regions, kernels without matrix units."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from volseg import experiment
from volseg.experiment.data_facts import find_facts
from volseg.experiment.forecast_beside import LOWEST_PRIORITY, Gpus, PlanBeside
from volseg.experiment.forecasting import describe_training, find_reserve
from volseg.forecast.allocator import find_memory_use
from volseg.forecast.candidate import Candidate
from volseg.forecast.early_end import EarlyEnd
from volseg.forecast.following import following
from volseg.forecast.gpu_kinds import find_kind
from volseg.forecast.kernel_class import classify
from volseg.forecast.trace import Allocate, Free, KernelRun, Mark, Sent, StepTrace
from volseg.parallel.candidates.running import follow_candidate
from volseg.parallel.followed_replicas import FollowedReplicas

H200 = find_kind("h200")
MIB = 2**20
UNET = Path(__file__).parents[2] / "configs" / "task04_unet.yaml"


def describe(*overrides: str):
    config = experiment.load_config(UNET, overrides)
    return describe_training(config, torch.bfloat16, find_facts(config))


def find_use(*overrides: str):
    work = describe("split.validation=none", *overrides).work
    (trace,) = follow_candidate(work, Candidate(kernels="fast", recorded=True), H200)
    return find_memory_use(trace)


def test_batches_on_their_way_and_cublas_beside_them_are_counted():
    """With growing patches Task04's U-Net took 0.660 GiB in tensors, 0.881 reserved; forecast were 0.590 and 0.791."""
    growth = "patch.growth=[{until: 0.5, size: [24, 32, 24]}]"
    grown, plain, still = find_use(growth), find_use(), find_use("augmentation.enabled=false")
    assert grown.used / 2**30 == pytest.approx(0.660, rel=0.01)
    assert grown.reserved / 2**30 == pytest.approx(0.881, rel=0.03)
    # Without blur and low resolution nothing is multiplied; each size has a stream, and cuBLAS memory for it.
    assert plain.used - still.used == pytest.approx(32 * MIB, abs=MIB)
    assert grown.used - plain.used == pytest.approx(32 * MIB, abs=MIB)


def test_what_a_users_augmentations_take_is_said_not_to_be_counted():
    described = describe()
    own = experiment.load_config(UNET, ["augmentation.own=[{name: Bias}]"])
    assert not any("of your own" in note for note in _list_notes(described, described.config))
    assert any("of your own (Bias)" in note for note in _list_notes(described, own))


def _list_notes(described, config):
    return find_reserve(replace(described, config=config), 16 * 2**30)[1]


def test_regions_can_be_followed(tmp_path):
    """Tables of a loss were made on the host: within a function that has come by an override, modes are off."""
    told = {"labels": {"0": "background", "1": "edema", "2": "core"}, "regions": {"whole": [1, 2], "core": [2]}}
    case = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    told |= {"name": "Regions", "modality": {"0": "T1"}, "numTraining": 1, "training": case, "test": []}
    (tmp_path / "dataset.json").write_text(json.dumps(told), encoding="utf-8")
    described = describe(f"data.root={tmp_path}", "network={name: UNet, channels: [8, 16], strides: [2]}")
    assert described.facts.task.regions
    (trace,) = follow_candidate(described.work, Candidate(kernels="fast"), H200)
    assert find_memory_use(trace).used > 0


def test_tensors_of_numbers_lie_where_they_are_asked_for_within_functions_that_have_overrides():
    with following(H200) as followed:
        (device,) = followed.devices

        def make(tensor):
            return torch.tensor([1.0, 2.0], device=device) + torch.as_tensor([1.0, 2.0], device=device) + tensor

        assert make(torch.empty(2, device=device)).device == device
    assert torch.tensor([1.0]).device == torch.device("cpu")
    assert torch.tensor.__name__ == "tensor", "torch's own again"


def make_run(name: str, *shapes: tuple[int, ...]) -> KernelRun:
    moved = 2 * sum(torch.Size(shape).numel() for shape in shapes)
    return KernelRun(name, torch.bfloat16, 0, moved, shapes, channels_last=True)


def test_depthwise_kernels_take_what_cudas_cores_do():
    """7 x 7 x 7 was forecast by bytes, twenty times too fast by its operations.

    Of 3 x 3 x 3 taps, which were measured, the operations take 4 and 6 times as long as at these cores' best.
    """
    volume = (1, 32, 128, 128, 128)
    wide, small = (make_run("convolution.depthwise._depthwise_kernel", volume, (k, 32), volume) for k in (343, 27))
    weight = make_run("convolution.depthwise._depthwise_weight_kernel", volume, volume, (21, 7, 7, 7, 32))
    operations = 2 * 343 * 32 * 128**3
    assert [classify(run)[0].flops for run in (wide, weight)] == [operations, operations]
    for run in (wide, weight):
        assert operations / 67e12 < H200.seconds(run) < 7 * operations / 67e12
    by_bytes = small.bytes_moved / 4.8e12
    assert by_bytes < H200.seconds(small) < 5 * by_bytes
    assert find_kind("a100-40").seconds(wide) > 2 * H200.seconds(wide)


def test_few_taps_of_many_channels_are_as_many_taps_of_one():
    """A 1 x 1 x 1 convolution of 32 channels, whose row is as long as that of 27 taps, was forecast at 2.3 ms."""
    run = make_run("convolution.few_taps._forward_kernel", (1, 32, *(128,) * 3), (64, 32), (1, 64, *(128,) * 3))
    assert run.bytes_moved / 4.8e12 < H200.seconds(run) < 0.6e-3


def test_a_bucket_with_a_parameter_that_is_not_used_is_summed_all_the_same():
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    with following(H200) as followed:
        (device,) = followed.devices
        layers = [followed.copy(each).to(device) for each in (used, unused)]
        parameters = [each for layer in layers for each in layer.parameters()]
        replicas = FollowedReplicas(lambda x: layers[0](x), parameters, 2)
        for _ in range(3):
            replicas(torch.empty(2, 4, device=device)).sum().backward()
    (trace,) = followed.traces()
    sums = [event for event in trace.events if isinstance(event, Sent) and event.kind == "all_reduce"]
    assert [each.size for each in sums] == [4 * 40] * 2, "that of the last pass is told of by the next"


def test_a_step_is_given_up_where_torch_would_run_out_of_memory_with_what_it_keeps():
    events = []
    end = EarlyEnd(44 * MIB)

    def is_reached(event):
        events.append(event)
        return end.is_reached(events)

    # Two pieces of 12 MiB are free in segments of their own, which are given back; then all is held.
    assert not any(map(is_reached, [Allocate(1, 12 * MIB), Allocate(2, 12 * MIB), Free(1), Free(2)]))
    assert not is_reached(Allocate(3, 40 * MIB))
    assert is_reached(Allocate(4, 12 * MIB))
    assert not is_reached(Free(3)), "once"
    recorded = EarlyEnd(8 * MIB)
    assert not recorded.is_reached([Mark("record")])
    assert not recorded.is_reached([Mark("record"), Allocate(1, 40 * MIB)]), "one without a recording may need less"
    assert StepTrace(tuple(events)).events[-1] == Free(3)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="a system without priorities")
def test_a_forecast_that_nobody_waits_for_gives_way_to_the_training():
    gpus = Gpus(name="NVIDIA H200", memory=139 * 2**30)
    beside = PlanBeside(describe().config, gpus, waits=False)
    waited_for = PlanBeside(describe().config, gpus)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        found = [os.getpriority(os.PRIO_PROCESS, plan._process.pid) for plan in (beside, waited_for)]
        assert found == [LOWEST_PRIORITY, own]
    finally:
        beside.close()
        waited_for.close()
