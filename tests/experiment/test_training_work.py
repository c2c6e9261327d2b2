"""What is followed of a config, and what is known of a data set that is not there."""

from dataclasses import replace

import pytest
import torch

from volseg.errors import ConfigError, DataError, OutOfMemoryError
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.step_memory import compute_memory_use
from volseg.experiment import load_config
from volseg.experiment.network_plan import load_facts
from volseg.experiment.placement.training_work import (
    AUGMENTATION,
    at_size,
    compute_validated_shape,
    describe_freedom,
    describe_training,
    estimate_reserve,
)
from volseg.models.fit_grid import FitGrid

GIB = 2**30
VNET = "configs/task04_vnet.yaml"
SMALL = "network={name: UNet, channels: [4, 8], strides: [2]}"


@pytest.fixture
def describe(repository):
    def build(*overrides):
        loaded = load_config(repository / VNET, [SMALL, *overrides])
        return describe_training(loaded, torch.float32, load_facts(loaded))

    return build


@pytest.fixture
def repository(request):
    return request.config.rootpath


def load(repository, *overrides):
    return load_config(repository / VNET, overrides)


def test_a_data_set_is_asked_known_or_described(task, repository):
    facts = load_facts(load(repository, "data.root=somewhere/Task05_Prostate"))
    assert (facts.task.num_channels, facts.task.num_outputs) == (2, 3)
    assert facts.source == "the published facts of Task05_Prostate"
    facts = load_facts(load(repository))
    # 260 cases of 35 x 50 x 36 voxels, a float32 and a class each.
    assert facts.case_bytes == 260 * 35 * 50 * 36 * 5
    assert facts.largest == (43, 59, 47)
    facts = load_facts(load(repository, f"data.root={task}"))
    assert facts.source == f"the description in {task}"
    assert len(facts.task.training) > 0
    assert facts.case_bytes is None
    facts = load_facts(load(repository, "data.root=nowhere"), channels=4, classes=5)
    assert (facts.task.num_channels, facts.task.num_outputs) == (4, 5)


@pytest.mark.parametrize("said", [{}, {"channels": 2}, {"classes": 2}])
def test_what_is_missing_is_named(said, repository):
    with pytest.raises(DataError, match=r"nowhere does not exist; state them with --channels N --classes N"):
        load_facts(load(repository, "data.root=nowhere"), **said)


def test_the_step_is_that_of_the_training(describe):
    """It runs on values too: one step changes every weight, and the average follows."""
    described = describe("patch.size=[16, 16, 16]", "patch.batch=2")
    work = described.work
    assert (work.shape, work.batch_size, work.name) == ((2, 1, 16, 16, 16), 2, "UNet")
    torch.manual_seed(0)
    model = work.build()
    assert isinstance(model, FitGrid)
    assert model.training
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = work.build_optimizer(model)
    assert optimizer.param_groups[0]["fused"], "as on a GPU"
    batch = work.make_batch(2, torch.device("cpu"))
    assert batch["label"].dtype == torch.uint8
    losses = work.build_step(model, optimizer)({**batch, "image": torch.randn_like(batch["image"])})
    assert losses["loss"].isfinite()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert len(changed) > 0.9 * len(before)


def test_gathered_batches_are_followed_as_two_and_another_size_is_the_same_network(describe):
    assert [describe(f"training.accumulate={count}").batches for count in (1, 8)] == [1, 2]
    larger = at_size(describe(), (64, 64, 48)).work
    assert larger.shape == (8, 1, 64, 64, 48)
    assert larger.make_batch(3, torch.device("cpu"))["image"].shape == (3, 1, 64, 64, 48)


@pytest.mark.parametrize(
    ("overrides", "dtype", "expected"),
    [
        ([], torch.bfloat16, {"kernels": ("fast", "torch"), "records": True}),
        ([], torch.float16, {"kernels": ("torch",), "records": False}),
        (["training.record=false"], torch.bfloat16, {"kernels": ("torch",), "records": False}),
        (["training.kernels=torch"], torch.bfloat16, {"kernels": ("torch",), "records": True}),
        (["training.kernels=compiled"], torch.bfloat16, {"kernels": ("torch",), "records": True}),
        (["training.kernels=measured"], torch.bfloat16, {"kernels": ("fast", "torch"), "records": True}),
        (["training.kernels=fast"], torch.float16, {"kernels": ("fast",), "records": False}),
        (["training.accumulate=2"], torch.bfloat16, {"kernels": ("torch",), "records": False}),
        (["parallel={spatial: 2}"], torch.bfloat16, {"data": None, "spatial": 2, "pipeline": 1}),
        (["parallel={strategy: spatial, checkpoint: 2}"], torch.bfloat16, {"data": 1, "pipeline": 1, "checkpoint": 2}),
        (["parallel={pipeline: 2, split_size: 4}"], torch.bfloat16, {"data": 1, "spatial": 1, "split_size": 4}),
    ],
)
def test_what_the_config_decides_is_not_open(overrides, dtype, expected, repository):
    free = describe_freedom(load(repository, *overrides), dtype, has_fast_kernels=True)
    assert {name: getattr(free, name) for name in expected} == expected


def test_a_kind_of_gpu_without_fast_kernels_takes_torchs(repository):
    assert describe_freedom(load(repository), torch.bfloat16, has_fast_kernels=False).kernels == ("torch",)


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        ([], 260 * 35 * 50 * 36 * 5 / GIB),
        (["data.keep=memory"], 0.0),
        (["data.device_limit=0.01"], 0.01),
        (["data.root=Task03_Liver"], 0.3 * 16),
        (["data.root=Task03_Liver", "data.keep=device"], 16.0),
    ],
)
def test_prepared_cases_take_their_share_of_a_gpu(describe, overrides, gib):
    described = describe(*overrides)
    reserve, notes = estimate_reserve(described, 16 * GIB)
    ahead = 2 * 8 * 32 * 48 * 32 * 5 + AUGMENTATION
    assert reserve == pytest.approx(gib * GIB + ahead, abs=2)
    assert any("prepared cases" in note for note in notes) is (gib > 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["network={name: SwinUNETR, feature_size: 13}"], "SwinUNETR"),
        (["losses=[{name: DiceLoss, sigmoid: true, softmax: true}]"], "DiceLoss"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(describe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        describe(*overrides)


def find_part(described, recorded, capacity=None):
    trace, *_ = trace_candidate(described.work, Candidate(kernels="torch", recorded=recorded), find_kind("h200"))
    return compute_memory_use(trace, capacity=capacity)


def test_a_validation_s_windows_lie_beside_what_the_training_keeps(describe):
    """A run that fits in training and is out of memory in its first validation is a lost run."""
    patch = ["patch.size=[32, 32, 32]", "patch.batch=2"]
    small, large = (describe(*patch, f"inference.window={[side] * 3}") for side in (16, 160))
    step, validated = find_part(small, recorded=False), find_part(large, recorded=False)
    assert step.peak_in != "validate"
    assert validated.peak_in == "validate"
    assert validated.total > step.total
    assert validated.of_steps().total == step.of_steps().total == step.total
    # An eager step's cache serves the windows as well; what a recording took stays its own.
    recorded = [find_part(each, recorded=True) for each in (small, large)]
    assert recorded[1].total - recorded[0].total > validated.total - step.total
    with pytest.raises(OutOfMemoryError, match="out of memory in validate"):
        find_part(large, recorded=True, capacity=recorded[1].used - 2**20)


def test_without_windows_the_largest_volume_is_validated_and_without_a_validation_none(describe):
    described = describe("inference.window=null")
    assert compute_validated_shape(described.config, described.facts) == (
        4,
        1,
        *described.facts.largest,
    )  # inference.batch
    unknown = replace(described.facts, largest=None)
    assert compute_validated_shape(described.config, unknown) is None
    _, notes = estimate_reserve(replace(described, facts=unknown), 16 * GIB)
    assert any("validation of whole volumes is not counted" in note for note in notes)
    without = describe("split.validation=none")
    assert without.work.validate is None
    assert not any("validation" in note for note in estimate_reserve(without, 16 * GIB)[1])
