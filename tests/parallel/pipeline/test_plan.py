import re
from dataclasses import replace

import pytest
import torch

from volseg.parallel.pipeline.balance import KeptActivation
from volseg.parallel.pipeline.costs import Measured
from volseg.parallel.pipeline.partition import LayerCost, Partition
from volseg.parallel.pipeline.stages import plan_stages
from volseg.parallel.pipeline.trace import Trace

SIZES = [3 * 2**30, 2 * 2**30, 2**30, 2**30]
FREE = [float("inf")] * 4
GPUS = [torch.device("cuda", index) for index in range(4)]


def measured(*times: float, activation_bytes: int = 0) -> Measured:
    layers = tuple(
        LayerCost(modules=(str(n),), forward_ms=ms / 3, backward_ms=2 * ms / 3) for n, ms in enumerate(times)
    )
    kept = tuple(KeptActivation(activation_bytes, made=n, kept=(n,)) for n in range(len(times)))
    return Measured(Trace(), layers, kept)


def count_layers(plan: Partition) -> tuple[int, ...]:
    return tuple(len(stage.layers) for stage in plan.stages)


def test_many_micro_batches_use_all_devices():
    plan = plan_stages(measured(*[1.0] * 8), GPUS, 1, 16, FREE, is_recorded=True)
    assert count_layers(plan) == (2, 2, 2, 2)
    assert plan.notes == ()


def test_devices_that_would_not_help_stay_idle_and_it_is_said():
    plan = plan_stages(measured(0.001, 0.001, 0.001, 0.001), GPUS, 1, 2, FREE, is_recorded=True)
    assert count_layers(plan) == (4,)
    assert re.match(r"3 of 4 devices stay idle: .* 4 separable layers; .*: 1: 0\.008, 2: 0\.1", plan.notes[0])
    assert plan.batch_ms == min(plan.predicted_ms.values())


def test_few_layers_are_told_from_slow_stages():
    plan = plan_stages(measured(5.0, 5.0), GPUS, 1, 16, FREE, is_recorded=True)
    assert count_layers(plan) == (1, 1)
    assert plan.notes[0].startswith("2 of 4 devices stay idle: the network has 2 separable layers")


def test_memory_that_fewer_devices_lack_is_spread():
    slow_copies = measured(0.001, 0.001, 0.001, 0.001, activation_bytes=100)
    plan = plan_stages(slow_copies, GPUS, 1, 2, [500.0] * 4, is_recorded=True)
    assert count_layers(plan) == (2, 2)
    assert sorted(plan.predicted_ms) == [2, 3, 4]


def test_what_seems_too_large_is_cut_for_even_memory(caplog):
    plan = plan_stages(
        measured(9.0, 1.0, 1.0, 1.0, activation_bytes=100), GPUS[:2], 1, 2, [100.0] * 2, is_recorded=True
    )
    assert count_layers(plan) == (2, 2)
    assert plan.batch_ms == float("inf")
    assert "cutting for even memory" in caplog.text


def test_time_is_that_of_the_slowest_stage_and_its_copies():
    plan = plan_stages(measured(1.0, 1.0), GPUS[:2], 1, 8, FREE, is_recorded=True)
    assert plan.batch_ms == pytest.approx(2 + 7 * 1 + 2 * 0.05)


def test_stages_may_hold_different_memory():
    layers = measured(1.0, 1.0, 1.0, 1.0)
    uneven = replace(layers, activations=tuple(KeptActivation(size, made=n, kept=(n,)) for n, size in enumerate(SIZES)))
    plan = plan_stages(uneven, GPUS[:2], 1, 16, FREE, is_recorded=True)
    assert count_layers(plan) == (2, 2)
    assert [stage.activation_bytes for stage in plan.stages] == [5 * 2**30, 2 * 2**30]
