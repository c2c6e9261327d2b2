"""``volseg plan`` from end to end on a CPU: nothing here needs a GPU or data."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

import volseg
from volseg.cli import app
from volseg.errors import ConfigError, ParallelError
from volseg.estimate import PlanReport
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.report import VolumesReport
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment import load_config, resolve_machine
from volseg.experiment.placement import mesh_resolution
from volseg.experiment.placement.alternatives import Answer, Gpus, list_settings
from volseg.experiment.placement.mesh_resolution import choose_by_estimate, choose_mesh
from volseg.experiment.placement.plan_command import plan_training
from volseg.workflow.components import LOSSES

GIB = 2**30
SMALL = [
    "--set",
    "network={name: UNet, channels: [4, 8, 8], strides: [4, 4]}",
    "--set",
    "patch={size: [16, 16, 16], batch: 2}",
]


@pytest.fixture
def vnet(request):
    return str(request.config.rootpath / "configs" / "task04_vnet.yaml")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_verb_prints_a_table_and_how_to_train(vnet, tmp_path):
    own = tmp_path / "my own.py"
    own.write_text("", encoding="utf-8")
    told = run(vnet, *SMALL, "--components", str(own), "--instance", "p3.2xlarge")
    assert told.exit_code == 0, told.output
    assert "UNet, 2 x 1 x 16 x 16 x 16, float16, on 1 x Tesla V100-SXM2-16GB" in told.output
    assert "(p3.2xlarge, 3.06 $ an hour)" in told.output
    assert "> one GPU" in told.output
    assert "$/epoch" in told.output
    command = next(line for line in told.output.splitlines() if line.startswith("  volseg train"))
    planned = ["volseg", "train", vnet, *SMALL, "--components", str(own)]
    assert shlex.split(command) == planned, "what is trained is what was planned, pasted into a shell"
    assert "Times follow from published rates" in told.output
    assert "channels and classes from the published facts of Task04_Hippocampus" in told.output


@pytest.mark.parametrize("more", [[], ["--max-volume"]])
def test_weights_to_begin_with_are_planned_with_and_missed_as_by_a_training(vnet, tmp_path, more):
    """Absent ones were planned without a word, and refused by the training on the machine that was rented by then."""
    start = ["--set", f"training.start_from={tmp_path / 'some.pt'}"]
    told = run(vnet, *SMALL, *start, "--gpu", "h200", *more)
    assert isinstance(told.exception, ConfigError)
    assert f"training.start_from: {tmp_path / 'some.pt'} does not exist" in str(told.exception)
    if not more:
        torch.save({"weight": torch.zeros(1)}, tmp_path / "some.pt")
        told = run(vnet, *SMALL, *start, "--gpu", "h200")
        assert told.exit_code == 0, told.output
        assert shlex.join(start) in told.output


def test_json_is_a_plan_report(vnet):
    told = run(vnet, *SMALL, "--gpus", "2", "--gpu", "h200", "--json")
    assert told.exit_code == 0, told.output
    report = PlanReport.model_validate_json(told.stdout)
    assert (report.num_gpus, report.rates, report.precision) == (2, "measured", "bfloat16")
    names = {row.name for row in report.candidates}
    (stages, *_) = [row for row in report.candidates if row.pipeline == 2 and row.used_bytes is not None]
    assert len({*stages.stage_used_bytes}) == 2, "stages hold different layers"
    assert (stages.used_bytes, stages.reserved_bytes) in zip(
        stages.stage_used_bytes, stages.stage_reserved_bytes, strict=True
    )
    assert {"one GPU", "data: 2", "spatial: 2", "pipeline: 2, split_size: 1"} <= names
    assert [row.state for row in report.candidates].count("chosen") == 1
    for row in report.candidates:
        assert (row.state == "slower") == (row.reserved_bytes is None), row
    assert json.loads(told.stdout)["steps_per_epoch"] == 250


def test_where_nothing_fits_the_status_is_3_and_remedies_have_numbers(vnet):
    sizes = ["--set", "patch={size: [256, 256, 256], batch: 2}"]
    # Of a GPU among others nearly 2 GiB are CUDA's, NCCL's and the mailboxes': of smaller ones no number helps.
    told = run(vnet, *SMALL[:2], *sizes, "--gpus", "1", "--gpu-memory", "3GiB", "--json")
    assert told.exit_code == 3, told.output
    report = PlanReport.model_validate_json(told.stdout)
    assert not report.fits
    assert report.why.startswith("nothing fits; the least is one GPU")
    assert any("GPUs of " in remedy for remedy in report.remedies)
    more = [remedy for remedy in report.remedies if "such GPUs: spatial: " in remedy]
    assert ["checkpoint: tiled" in remedy for remedy in more] == [True], "as much as can be is recomputed there"
    assert any("volumes of " in remedy for remedy in report.remedies)


def test_numbers_are_told_of_what_does_not_fit_where_they_are_asked_for(vnet):
    sizes = ["--set", "patch={size: [128, 128, 256], batch: 2}", "--set", "parallel.spatial=2"]
    asked = (vnet, *SMALL[:2], *sizes, "--gpus", "2", "--gpu-memory", "1900MiB", "--json")
    short, full = (PlanReport.model_validate_json(run(*asked, *more).stdout) for more in ([], ["--numbers"]))
    given_up = {row.name: row for row in short.candidates if row.more_than_bytes is not None}
    whole = {row.name: row for row in full.candidates}
    assert given_up
    for name, row in given_up.items():
        assert row.state == whole[name].state == "refused"
        assert (row.reserved_bytes, row.step_seconds) == (None, None)
        assert whole[name].reserved_bytes + whole[name].outside_bytes > row.more_than_bytes
        assert whole[name].more_than_bytes is None
    assert [row for row in short.candidates if row.name not in given_up] == [
        row for row in full.candidates if row.name not in given_up
    ]


def plan_small(vnet, *overrides, **machine):
    return plan_training(load_config(vnet, [*SMALL[1::2], *overrides]), resolve_machine(**machine))


def test_the_average_of_the_weights_is_held_besides(vnet):
    """For a network whose memory is mostly weights."""
    wide = ["network={name: UNet, channels: [256, 256], strides: [2]}", "patch={size: [4, 4, 4], batch: 2}"]
    without, held = (
        plan_small(vnet, *wide, f"training.ema={ema}", kind="v100-16").forecasts[0] for ema in ("null", "0.9")
    )
    weights = 4 * 256 * 256 * 27  # float32, of the largest of its convolutions alone
    assert held.memory.used - without.memory.used > weights


def test_gathered_batches_take_that_much_longer_and_no_more_memory(vnet):
    two, six = (plan_small(vnet, f"training.accumulate={count}", kind="v100-16") for count in (2, 6))
    assert six.forecasts[0].seconds == pytest.approx(3 * two.forecasts[0].seconds)
    assert six.forecasts[0].memory == two.forecasts[0].memory
    assert (two.report.steps_per_epoch, six.report.steps_per_epoch) == (125, 42)


@pytest.mark.slow  # some twenty steps are followed
def test_the_largest_patch_fits_and_the_next_does_not(vnet):
    told = run(vnet, *SMALL, "--gpu-memory", "2GiB", "--set", "parallel.strategy=spatial", "--max-volume", "--json")
    assert told.exit_code == 0, told.output
    report = VolumesReport.model_validate_json(told.stdout)
    plain = report.rows[0]
    assert plain.sides is not None
    assert plain.next_sides is not None
    machine = resolve_machine(gpu_memory="2GiB")

    def fits(sides):
        overrides = [*SMALL[1:2], "parallel.strategy=spatial", f"patch={{size: {list(sides)}, batch: 2}}"]
        return plan_training(load_config(vnet, overrides), machine).forecasts[0].runs

    assert fits(plain.sides)
    assert not fits(plain.next_sides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instance": "p3.8xlrage"}, r"'p3.8xlrage' \(did you mean 'p3.8xlarge'"),
        ({"kind": "v100-61"}, "did you mean 'v100-16'"),
        ({"gpu_memory": "sixteen"}, "the memory of a GPU must be a size such as 16GiB, got 'sixteen'"),
        ({"instance": "p3.2xlarge", "num_gpus": 2}, r"--gpus 2 asks for more than the 1 GPU\(s\) of p3.2xlarge"),
        ({"instance": "p3.2xlarge", "here": True}, "got more than one of these"),
    ],
)
def test_a_machine_that_is_not_known_is_refused_with_the_nearest(arguments, message):
    with pytest.raises(ConfigError, match=message):
        resolve_machine(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("here", [False, True])
def test_without_a_gpu_a_machine_must_be_named(here):
    with pytest.raises(ConfigError, match=r"--instance"):
        resolve_machine(here=here)


@pytest.mark.parametrize(("size", "kind"), [("16GiB", "V100"), ("80GiB", "H100"), ("140GiB", "H200"), ("24", "A10G")])
def test_a_memory_stands_for_the_kind_that_has_it(size, kind):
    machine = resolve_machine(num_gpus=2, gpu_memory=size)
    assert kind in machine.gpu.name
    assert machine.gpu_bytes == machine.gpu.memory, "what CUDA tells is less than what is sold"
    assert resolve_machine(gpu_memory="3GiB").gpu_bytes == 3 * GIB, "another memory is taken at its word"


LOSSES_THAT_LOOK_AT_VOXELS = ("BoundaryLoss", "HausdorffDTLoss", "LogHausdorffDTLoss")

OPTIONS = [
    "{name: DiceCELoss, weight: [0.2, 0.3, 0.5]",
    "{name: DiceFocalLoss, include_background: false, batch: true, weight: [0.3, 0.7]",
    "{name: FocalLoss, alpha: 0.5",
    "{name: FocalLoss, weight: [0.2, 1, 2], gamma: 2",  # which asks in each call whether one is negative
    "{name: TverskyLoss, reduction: sum",
]


def sum_losses(losses):
    """Return the setting of a loss that is a sum of others."""
    return f"losses=[{', '.join(f'{loss}, output: term_{n}}}' for n, loss in enumerate(losses))}]"


@pytest.mark.parametrize("deep", [False, True], ids=["one output", "deep supervision"])
def test_losses_and_their_options_are_followed(vnet, deep):
    """Most of MONAI's sum over ``torch.arange(2, 5).tolist()``, whose numbers a trace has."""
    plain = [f"{{name: {name}" for name in sorted(LOSSES) if name not in LOSSES_THAT_LOOK_AT_VOXELS]
    dynunet = "{name: DynUNet, filters: [4, 8, 8], kernel_size: [3, 3, 3], strides: [1, 2, 2], deep_supr_num: 1}"
    network = [f"network={dynunet}", "network.deep_supervision=true"] if deep else []
    losses = sum_losses(OPTIONS if deep else [*OPTIONS, *plain])
    assert plan_small(vnet, *network, losses, kind="v100-16").forecasts[0].runs


@pytest.mark.parametrize("name", LOSSES_THAT_LOOK_AT_VOXELS)
def test_losses_that_look_at_voxels_are_refused_in_a_sentence(vnet, name):
    with pytest.raises(ParallelError, match=rf"{name} .*asks for a tensor's value.*plan with another loss.*DiceCE"):
        plan_small(vnet, f"losses=[{{name: {name}}}]", kind="v100-16")


def test_an_optimizer_that_asks_for_lists_is_not_fused_besides(vnet):
    """On a GPU torch, which accepts only one of them, ended the training with a traceback."""
    lists, fused = (
        plan_small(vnet, "training.precision=bf16", f"optimizer={{{name}}}", kind="h200").forecasts[0]
        for name in ("name: Adam, lr: 0.1, foreach: true", "name: Adam, lr: 0.1")
    )
    assert fused.runs
    assert lists.runs
    assert (fused.candidate.recorded, lists.candidate.recorded) == (True, False)


def test_a_network_of_one_size_is_refused_as_its_training_would_be(vnet):
    """The error was that it cannot be traced, because of the size of a validation's volumes."""
    unetr = "network={name: UNETR, feature_size: 4, hidden_size: 24, mlp_dim: 24, num_heads: 2}"
    sizes = ["patch={size: [32, 32, 32], batch: 2}"]
    with pytest.raises(ConfigError, match=r"supports only volumes of \(32, 32, 32\) voxels; set inference.window to"):
        plan_small(vnet, unetr, *sizes, kind="h200")
    assert plan_small(vnet, unetr, *sizes, "inference.window=[32, 32, 32]", kind="h200").forecasts[0].runs


class LooksAtValues(torch.nn.Module):
    """A network that cannot be followed without values."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)


PLAIN, SHAPE = torch.nn.Conv3d(1, 2, 3), (1, 1, 16, 16, 16)


@pytest.mark.parametrize(
    ("net", "shape", "named", "message"),
    [
        (LooksAtValues(), SHAPE, {"gpu": "v100-16"}, r"LooksAtValues cannot be followed on \(1, 1, 16, 16, 16\): "),
        (torch.nn.Conv3d(3, 2, 3), SHAPE, {"gpu": "v100-16"}, "cannot be followed"),
        (PLAIN, SHAPE[2:], {"gpu": "v100-16"}, r"\(B, C, D, H, W\), got \(16, 16, 16\)"),
        (PLAIN, SHAPE, {"gpu": "v100-16", "precision": "fp8"}, "got 'fp8'"),
        (PLAIN, SHAPE, {"gpu": "v100-16", "instance": "p3.2xlarge"}, "GPUs of its own"),
        (PLAIN, SHAPE, {"instance": "p3.2xlarge", "gpus": 2}, r"gpus=2, but .* has 1 GPU\(s\)"),
    ],
)
def test_volseg_plan_refuses_what_means_nothing(net, shape, named, message):
    with pytest.raises(ParallelError, match=message):
        volseg.plan(net, shape, **named)


def test_volseg_plan_leaves_the_network_as_it_is():
    net = torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.BatchNorm3d(4), torch.nn.Conv3d(4, 2, 1))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plan = volseg.plan(net, (4, 1, 32, 32, 32), gpu="h200", gpus=2)
    assert plan.chosen is not None
    assert plan.report.num_gpus == 2
    assert plan.table().count("\n") > 3
    assert json.loads(plan.to_json())["fits"] is True
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    ("candidate", "settings"),
    [
        (Candidate(), []),
        (Candidate(data=4), ["parallel.data=4"]),
        (Candidate(data=2, spatial=2), ["parallel.data=2", "parallel.spatial=2"]),
        (Candidate(pipeline=4, split_size=2), ["parallel.pipeline=4", "parallel.split_size=2"]),
        (Candidate(spatial=2, checkpoint="all"), ["parallel.spatial=2", "parallel.checkpoint=all"]),
        (Candidate(checkpoint=1), ["parallel.strategy=spatial", "parallel.devices=1", "parallel.checkpoint=1"]),
    ],
)
def test_settings_are_what_a_config_takes(candidate, settings, vnet):
    assert list_settings(candidate) == settings
    parallel = load_config(vnet, settings).parallel
    assert (parallel.checkpoint, parallel.split_size) == (candidate.checkpoint, candidate.split_size)


def forecast(seconds, gib, **candidate):
    memory = MemoryUse(used=gib * GIB, reserved=gib * GIB, outside=0, peak_in="backward")
    return Estimate(candidate=Candidate(**candidate), memory=memory, seconds=seconds)


def test_the_processes_of_a_job_take_the_fastest_that_surely_fits_or_the_smallest():
    forecasts = [
        forecast(0.1, 4, pipeline=4, split_size=1),
        forecast(0.2, 20, data=4),
        forecast(0.3, 10, data=2, spatial=2),
        forecast(0.4, 5, spatial=4),
        forecast(0.05, 5),
    ]
    assert choose_mesh(forecasts, 4, 16 * GIB)[0] == forecasts[2].candidate
    smallest, why = choose_mesh(forecasts, 4, 3 * GIB)
    assert smallest == forecasts[3].candidate
    assert why.endswith("needs the least memory, but may not fit (5.0 GiB of 3.0 GiB)")
    assert choose_mesh(forecasts[:1], 4, 16 * GIB) == (None, "")


@pytest.mark.parametrize(
    "answer",
    [
        Answer(forecasts=(forecast(0.3, 4), forecast(0.2, 13, checkpoint=1)), reserve=3 * GIB),
        Answer(problem="of values"),
    ],
)
def test_a_mesh_is_chosen_beside_what_cases_take_or_left_to_the_config(vnet, monkeypatch, caplog, answer):
    monkeypatch.setattr(mesh_resolution, "run_plan", lambda config, gpus: answer)
    monkeypatch.setattr(Gpus, "find", lambda device, count: Gpus(name="NVIDIA H200", memory=16 * GIB, count=count))
    told = choose_by_estimate(load_config(vnet), torch.device("cpu"))
    assert (told.chosen, told.memory and told.memory.used) == (
        (None, None) if answer.problem else (Candidate(), 4 * GIB)
    )
    assert ("(of values), so samples are not cut; set" in caplog.text) == bool(answer.problem)
