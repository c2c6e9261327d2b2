"""The values of a plan beyond nnU-Net's, and the file that it writes."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volseg.config.loading import load_config
from volseg.errors import ConfigError
from volseg.models.topology import VNET_MONAI, is_thin
from volseg.planning.fingerprint import CaseSizes, Fingerprint, Intensities
from volseg.planning.geometry import PRESETS
from volseg.planning.plan import parse_memory, plan, write_config

CT = Intensities(mean=99.4, std=39.4, median=101, min=-1000, max=3000, percentile_00_5=-17, percentile_99_5=201.1234567)


def make_fingerprint(shape=(35, 50, 36), spacing=(1.0, 1.0, 1.0), *, count=20, kept=1.0, channels=("MRI",), **facts):
    """Return the fingerprint of a data set with equal cases."""
    cases = tuple(CaseSizes(case=f"case {i}", shape=shape, spacing=spacing, kept=kept) for i in range(count))
    given = {"labels": {0: "background", 1: "organ"}, "intensities": (CT,) * len(channels)} | facts
    return Fingerprint(task="Task11_Test", channels=channels, cases=cases, **given)


THICK = make_fingerprint((320, 320, 20), (0.625, 0.625, 3.6), channels=("T2", "ADC"))
LARGE = make_fingerprint((512, 512, 300), (0.8, 0.8, 1.5), channels=("CT",))


@pytest.mark.parametrize(("count", "share", "kept"), [(10, 0.99, ["organ"]), (9, 1.0, None), (10, 0.98, None)])
def test_stray_components_are_removed_where_every_case_has_one(count, share, kept):
    fingerprint = make_fingerprint(count=count)
    cases = [replace(case, largest={"organ": share} if number else {}) for number, case in enumerate(fingerprint.cases)]
    more = replace(cases[0], case="one more", largest={"organ": 1.0})
    inference = plan(replace(fingerprint, cases=(*cases, more))).values()["inference"]
    assert inference.get("keep_largest") == kept


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("fingerprint", [make_fingerprint(), THICK, LARGE], ids=["small", "thick", "large"])
def test_what_is_written_is_what_was_planned(fingerprint, preset, tmp_path):
    memory = 80.0 if preset == "whole" else 8.0
    planned = plan(fingerprint, preset, memory, root=tmp_path / "ein Ordner: é")
    path = write_config(planned, tmp_path / "planned.yaml")
    assert load_config(path) == planned.config()
    assert planned.config().data.root == tmp_path / "ein Ordner: é"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 400  # a list of strides
    assert max(len(line) for line in lines if line.lstrip().startswith("#")) <= 110


@pytest.mark.parametrize("preset", PRESETS)
def test_every_number_says_why(preset):
    """A setting has its own reason, or that of the previous setting in its section."""
    for fingerprint in (make_fingerprint(), THICK, LARGE):
        told = set()
        for setting in plan(fingerprint, preset, 80.0).settings:
            section = setting.key.rpartition(".")[0]
            told |= {section} if setting.reason else set()
            assert section in told or setting.key in ("name", "data.root"), setting.key


def test_a_file_is_replaced_by_force_only(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.yaml exists; choose another path, or use --overwrite to replace it"):
        write_config(plan(make_fingerprint()), path)
    assert path.read_text(encoding="utf-8") == "name: mine\n"
    write_config(plan(make_fingerprint()), path, overwrite=True)
    assert load_config(path).name == "task11_test_unet"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]


def steps(planned):
    return {step["name"]: step for step in planned.values()["preprocessing"]}


def test_ct_is_clipped_by_the_foregrounds_percentiles():
    found = steps(plan(LARGE))["ClipZScore"]
    assert found == {"name": "ClipZScore", "lower": -17.0, "upper": 201.123, "mean": 99.4, "std": 39.4}
    unknown = steps(plan(make_fingerprint(channels=("ct",), intensities=())))
    assert unknown["ClipZScore"] == {"name": "ClipZScore", "percentiles": [0.5, 99.5]}
    assert "ZScore" not in steps(plan(LARGE))


def test_each_channel_has_its_scheme():
    found = steps(plan(make_fingerprint(channels=("PET", "CT", "noNorm", "T2"), kept=0.5)))
    assert found["ClipZScore"]["channels"] == [1]
    assert found["ZScore"] == {"name": "ZScore", "nonzero": True, "channels": [0, 3]}


@pytest.mark.parametrize(("kept", "nonzero"), [(0.74, True), (0.75, False), (1.0, False)])
def test_moments_are_those_of_what_is_not_zero_where_cropping_takes_much(kept, nonzero):
    assert steps(plan(make_fingerprint(kept=kept)))["ZScore"].get("nonzero", False) is nonzero


@pytest.mark.parametrize(
    ("preset", "memory", "shape", "mm", "count", "patch", "batch", "strides"),
    [
        ("unet", 8.0, (512, 300), (0.8, 0.8), 900, [512, 320], 20, [[2, 2]] * 6),
        ("resenc", 8.0, (1400, 512), (0.8, 0.8), 40, [768, 320], 13, [*[[2, 2]] * 6, [2, 1]]),
        ("resenc", 24.0, (900, 1400), (0.8, 0.8), 5, [640, 1152], 9, [[2, 2]] * 7),
        ("unet", 8.0, (64, 128), (2.2, 1.0), 5, [64, 128], 2, [[1, 2], *[[2, 2]] * 4]),
    ],
)
def test_a_data_set_of_single_slices_has_nnunets_2d_plan(preset, memory, shape, mm, count, patch, batch, strides):
    """As nnunetv2 2.8.1 plans them; the spacing across a slice changes nothing, nor does the axis of the slices."""
    for axis, thick in ((2, 9.0), (2, 0.1), (0, 1.0)):

        def place(pair, single, axis=axis):
            return [*pair[:axis], single, *pair[axis:]]

        values = plan(make_fingerprint(tuple(place(shape, 1)), tuple(place(mm, thick)), count=count), preset, memory)
        network = values.values()["network"]
        assert values.values()["patch"]["size"] == place(patch, 1)
        assert values.values()["patch"]["batch"] == batch
        assert network["strides"] == [[1, 1, 1], *(place(stride, 1) for stride in strides)]
        assert {kernel[axis] for kernel in network["kernel_size"]} == {1}
        assert max(network["filters"]) == 512
        assert values.config().augmentation.scaling.axes == tuple(place([True, True], False))


def test_thick_slices_stay_slices():
    assert steps(plan(THICK))["Spacing"]["thick_slices"] == "nearest"
    assert "thick_slices" not in steps(plan(make_fingerprint()))["Spacing"]
    augmentation = plan(THICK).config().augmentation
    assert augmentation.rotation.degrees == (0.0, 0.0, 180.0)
    assert augmentation.scaling.axes == augmentation.low_resolution.axes == (True, True, False)
    assert plan(make_fingerprint()).config().augmentation.rotation.degrees == (30.0, 30.0, 30.0)


@pytest.mark.parametrize(
    ("names", "mirrors"),
    [
        (("left kidney", "Right Kidney"), False),
        (("kidney_left", "kidney_right"), False),
        (("left", "right"), False),
        (("left kidney", "liver"), True),
        (("cleft", "cright"), True),
    ],
)
def test_sides_of_the_body_are_not_mirrored_into_each_other(names, mirrors):
    config = plan(make_fingerprint(labels=dict(enumerate(("background", *names))))).config()
    assert config.augmentation.mirror.axes == (mirrors, True, True)
    assert config.inference.mirror is mirrors


def test_whole_volumes_are_cut_over_as_many_gpus_as_they_take():
    planned = plan(LARGE, "whole", 40.0)
    values, geometry = planned.values(), planned.geometry
    assert [side >= whole for side, whole in zip(values["patch"]["size"], (512, 512, 300), strict=True)] == [True] * 3
    assert values["patch"]["batch"] == 1
    assert values["parallel"] == {"spatial": math.ceil(geometry.features / (2 * geometry.reference))}
    assert values["parallel"]["spatial"] > 1
    assert values["inference"]["window"] is None
    assert plan(LARGE, "whole", 1000.0).config().parallel.spatial is None


def test_the_longest_case_counts_along_each_axis():
    cases = [
        CaseSizes(case=str(shape), shape=shape, spacing=(1, 1, 1))
        for shape in ((40, 20, 32), (24, 50, 32), (24, 20, 32))
    ]
    fingerprint = make_fingerprint()
    fingerprint = Fingerprint(task="T", channels=("a",), labels=fingerprint.labels, cases=tuple(cases))
    assert plan(fingerprint, "whole").geometry.patch == (40, 56, 32)


def test_what_no_gpus_hold_is_refused():
    with pytest.raises(ConfigError, match=r"need \d+ GPUs of 0.01 GiB, but can be cut into only 64 slabs"):
        plan(LARGE, "whole", 0.01)
    for preset in ("unet", "resenc", "vnet"):
        with pytest.raises(ConfigError, match=r"no patch fits: .* plan for a GPU with more memory"):
            plan(LARGE, preset, 1e-4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((5, 5, 5), (1, 1, 1)),
        ((1, 12, 12), (1, 1, 1)),
        ((30, 3, 7), (2, 1, 1)),
        ((3, 200, 200), (1, 1, 1)),
        ((6, 6, 6), (1, 3, 3)),
    ],
)
def test_small_cases_get_a_network_too(shape, spacing, preset):
    planned = plan(make_fingerprint(shape, spacing), preset)
    assert all(side >= case for side, case in zip(planned.geometry.patch, shape, strict=True))
    if planned.geometry.topology:
        assert len(planned.geometry.topology.strides) >= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "unett"}, "no preset is called 'unett'; did you mean 'unet'"),
        ({"gpu_memory": 0.0}, "must be positive, got 0.0 GiB"),
        ({"gpu_memory": math.nan}, "must be positive, got nan GiB"),
        ({"fingerprint": make_fingerprint(count=0)}, "Task11_Test has no usable case with a label"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(**{"fingerprint": make_fingerprint(), **changes})


@pytest.mark.parametrize("text", ["16 GiBs", "", "-3", "0", "nan", "1e3"])
def test_memory_is_a_size(text):
    with pytest.raises(ConfigError, match=re.escape(f"must be a size such as 16GiB, got {text!r}")):
        parse_memory(text)


def test_smaller_batches_learn_at_smaller_rates():
    rates = [plan(make_fingerprint(count=count)).values()["optimizer"]["lr"] for count in (10, 100, 1000)]
    assert rates == [0.0014, 0.002, 0.003]


def test_a_few_cases_are_split_as_far_as_they_go(tmp_path):
    """Five folds of three cases would be refused after planning."""
    splits = {count: plan(make_fingerprint(count=count)).values()["split"] for count in (1, 3, 5)}
    assert splits == {1: {"validation": "none"}, 3: {"num_folds": 3, "fold": 0}, 5: {"fold": 0}}
    written = write_config(plan(make_fingerprint(count=9), given_folds=4), tmp_path / "plan.yaml")
    assert "# of the 4 folds of the data set\n  fold: 0\n" in written.read_text(encoding="utf-8")


# A V-Net's plan follows the spacing: MONAI's network where voxels are nearly cubes, a flatter one elsewhere.

SIDES = [32, 48, 64, 96, 128, 160, 256]
TURNS = {"D": (2, 0, 1), "H": (0, 2, 1), "W": (0, 1, 2)}
"""By the axis of the slices: the order that puts (in plane, in plane, across) along D, H, W."""


def turn(values, axes):
    return tuple(values[axis] for axis in axes)


@pytest.mark.parametrize(
    ("shape", "spacing", "memory", "patch", "batch"),
    [
        ((35, 50, 36), (1, 1, 1), 8, (48, 64, 48), 2),  # Task04's cases, few of them
        ((320, 320, 88), (1.25, 1.25, 1.37), 8, (160, 160, 32), 3),  # left atria
        ((512, 512, 300), (0.8, 0.8, 1.5), 8, (128, 128, 64), 2),
        ((138, 169, 138), (1, 1, 1), 24, (128, 176, 128), 2),
        ((5, 5, 5), (1, 1, 1), 8, (16, 16, 16), 2),
    ],
)
def test_voxels_that_are_nearly_cubes_keep_monais_network(shape, spacing, memory, patch, batch):
    planned = plan(make_fingerprint(shape, spacing), "vnet", memory)
    assert planned.geometry.topology == VNET_MONAI
    assert (planned.geometry.patch, planned.geometry.batch) == (patch, batch)
    assert planned.values()["network"] == {
        "name": "VNet", "dropout_prob_down": 0.2, "dropout_prob_up": [0.2, 0.2], "dropout_prob_fine": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("axes", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize(
    ("shape", "spacing", "patch", "across"),
    [
        ((216, 256, 9), (1.5, 1.5, 10.0), (224, 256, 10), ((1, 1, 2, 1), (1, 1, 5, 5, 5))),  # cardiac MR
        ((320, 320, 20), (0.62, 0.62, 3.6), None, ((1, 1, 2, 1), (1, 1, 5, 5, 5))),  # prostate
        ((35, 50, 7), (1.0, 1.0, 5.0), (48, 64, 7), ((1, 1, 1, 1), (1, 1, 5, 5, 5))),
        ((216, 256, 9), (1.0, 1.0, 1.0), (224, 256, 10), ((2, 1, 1, 1), (5, 5, 5, 5, 5))),  # few slices, not thick
        ((100, 120, 2), (1.0, 1.0, 2.5), (112, 128, 2), ((1, 1, 1, 1), (1, 5, 5, 5, 5))),
        ((100, 120, 1), (1.0, 1.0, 1.0), (112, 128, 1), ((1, 1, 1, 1), (1, 1, 1, 1, 1))),
    ],
)
def test_thick_slices_are_halved_and_convolved_in_coarse_levels(shape, spacing, patch, across, axes):
    geometry = plan(make_fingerprint(turn(shape, axes), turn(spacing, axes)), "vnet").geometry
    if patch is not None:
        assert geometry.patch == turn(patch, axes)
    coarse = axes.index(2)
    assert tuple(stride[coarse] for stride in geometry.topology.strides[1:]) == across[0]
    assert tuple(kernel[coarse] for kernel in geometry.topology.kernels) == across[1]
    for axis in {0, 1, 2} - {coarse}:
        assert all(stride[axis] == 2 for stride in geometry.topology.strides[1:])
        assert all(kernel[axis] == 5 for kernel in geometry.topology.kernels)


@pytest.mark.parametrize("slices", range(1, 24))
def test_any_number_of_slices_is_padded_by_three_at_most(slices):
    """MONAI's V-Net made 16 of 9 slices, and 32 of 17."""
    fingerprint = make_fingerprint((216, 256, slices), (1.5, 1.5, 10.0))
    geometry = plan(fingerprint, "vnet", 80).geometry
    assert slices <= geometry.patch[2] < slices + 4
    assert geometry.patch[2] // geometry.topology.divisors[2] >= min(slices, 4)


@given(
    st.tuples(*[st.integers(1, 512)] * 3), st.tuples(*[st.floats(0.3, 12)] * 3), st.sampled_from([2.0, 8.0, 24.0, 80.0])
)
@settings(max_examples=150, deadline=None)
def test_every_data_set_gets_a_network_that_takes_its_patch(shape, spacing, memory):
    geometry = plan(make_fingerprint(shape, spacing), "vnet", memory).geometry
    topology = geometry.topology
    assert all(side % divisor == 0 for side, divisor in zip(geometry.patch, topology.divisors, strict=True))
    assert geometry.features <= geometry.reference
    assert all(math.prod(kernel) % 2 for kernel in topology.kernels)
    near = max(geometry.spacing) / min(geometry.spacing) < 2
    if near and not any(is_thin(geometry.median_shape)):
        assert topology == VNET_MONAI
        assert all(side % 16 == 0 for side in geometry.patch)


def test_the_dice_loss_leaves_out_the_background():
    classes = plan(make_fingerprint()).values()["losses"]
    assert classes == [{"name": "DiceCELoss", "include_background": False}]
    regions = plan(make_fingerprint(regions={"whole": (1, 2), "core": (2,)}, labels={0: "b", 1: "a", 2: "c"}))
    assert regions.values()["losses"] == [{"name": "DiceCELoss"}]
