import copy
import pickle

import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import ConfigError, DataError, GridError
from volseg.transforms.preprocessing import build_preprocessing

ORIENTED = torch.tensor(
    [[0, 0, -2.0, 5], [1.5, 0, 0, 3], [0, 1, 0, -7], [0, 0, 0, 1]], dtype=torch.float64
)  # axes point to A, S, L
ISOTROPIC = torch.tensor([[1, 0, 0, 2.5], [0, 1, 0, -3], [0, 0, 1, 8], [0, 0, 0, 1]], dtype=torch.float64)


def case_of(voxels, label=None, affine=ISOTROPIC):
    case = {"case": "knee_7", "image": MetaTensor(voxels, affine=affine.clone())}
    return case if label is None else case | {"label": MetaTensor(label, affine=affine.clone())}


@pytest.fixture
def case():
    image = torch.rand(2, 10, 12, 14) * 1000 + 5
    return case_of(image, (image[:1] > 500).float() * 2, ORIENTED)


def run(case, *components, **options):
    return build_preprocessing(components, **options)(case)


def test_nothing_listed_changes_nothing_but_types(case):
    case["label"] = MetaTensor(torch.full((1, 10, 12, 14), 300.0), affine=ORIENTED.clone())  # wider than a byte
    result = run(case)
    assert result["image"].as_tensor().equal(case["image"].as_tensor())
    assert result["image"].affine.equal(ORIENTED)
    assert (result["label"].long() == 300).all()  # a byte would equal the byte of 300


def test_result_is_a_float_image_and_an_integer_label_on_one_grid(case):
    case["label"].affine[0, 3] += 1e-4  # the label takes the affine of the image
    case["dose"] = MetaTensor(torch.rand(1, 10, 12, 14), affine=ORIENTED.clone())
    result = run(
        case, {"name": "Orientation"}, {"name": "Spacing", "spacing": [1, 1, 1]}, {"name": "ZScore"},
        {"name": "Pad", "multiple": 8}, fields=("image", "dose", "label"),
    )  # fmt: skip
    image, label = result["image"], result["label"]
    assert result["dose"].shape[1:] == image.shape[1:]
    assert image.meta["spatial_shape"] == (10, 12, 14)
    assert image.meta["original_affine"].equal(ORIENTED)
    assert (image.dtype, label.dtype) == (torch.float32, torch.uint8)
    assert image.shape[1:] == label.shape[1:] == (32, 16, 16)
    assert image.affine.equal(label.affine)
    assert image.affine.diagonal().tolist() == pytest.approx([1, 1, 1, 1])  # right, front and head are at the ends
    assert set(label.unique().tolist()) == {0, 2}  # nearest: no value between two labels
    assert result["case"] == "knee_7"


def test_the_case_that_was_read_is_not_written_to(case):
    before = copy.deepcopy(case)
    run(
        case, {"name": "Orientation"}, {"name": "CropForeground"}, {"name": "ZScore", "nonzero": True},
        {"name": "ClipZScore", "percentiles": [1, 99]}, {"name": "Pad", "size": [40, 40, 40]},
    )  # fmt: skip
    for field in ("image", "label"):
        assert case[field].as_tensor().equal(before[field].as_tensor())
        assert case[field].affine.equal(before[field].affine)
        assert case[field].meta.keys() == before[field].meta.keys()


@pytest.mark.parametrize("error", [0.0, 1e-7, 4e-4])
def test_data_at_the_target_spacing_pass_without_resampling(error):
    affine = ISOTROPIC.clone()
    affine[:3, :3] *= 1 + error  # as headers stored in float32 read
    voxels = torch.rand(1, 9, 11, 13) * 1e6
    image = run(case_of(voxels, affine=affine), {"name": "Spacing", "spacing": [1, 1, 1]})["image"]
    assert image.as_tensor().equal(voxels)
    assert image.affine.equal(affine)


THICK = torch.diag(torch.tensor([0.5, 0.5, 4.0, 1.0], dtype=torch.float64))


def test_thick_slices_are_resampled_within_planes_only():
    """nnU-Net's rule: no plane of the result is a mean of two planes of the file."""
    image, label = torch.rand(2, 12, 10, 5), (torch.rand(1, 12, 10, 5) > 0.5).float()
    target = {"name": "Spacing", "spacing": [0.8, 0.8, 2.5], "thick_slices": "nearest"}
    result = run(case_of(image, label, THICK), target)
    planes = run(case_of(image, label, THICK), {"name": "Spacing", "spacing": [0.8, 0.8, 4.0]})
    z = torch.arange(result["image"].shape[3]) * 2.5 / 4
    assert result["image"].affine.diagonal().tolist() == pytest.approx([0.8, 0.8, 2.5, 1])
    for field in ("image", "label"):
        assert torch.equal(result[field].as_tensor(), planes[field].as_tensor()[..., z.round().long()])
    tilted = THICK.clone()
    tilted[1, 2] = 1.5  # a tilted gantry: most voxels were means of two planes
    image = (torch.arange(9) % 2.0).repeat(1, 8, 40, 1)
    voxels = run(case_of(image, affine=tilted), target)["image"].as_tensor()
    assert set(voxels.round(decimals=6).unique().tolist()) == {0, 1}
    case = case_of(torch.rand(1, 8, 8, 9))
    planes = run(case, {"name": "Spacing", "spacing": [1, 1, 4], "thick_slices": "nearest"})["image"]
    assert torch.equal(planes.as_tensor(), case["image"].as_tensor()[..., ::4])  # thick slices of the target count too


@pytest.mark.parametrize(
    ("spacing", "target"),
    [((1.0, 1.0, 3.0), (0.8, 0.8, 2.4)), ((0.5, 4.0, 4.0), (1.0, 1.0, 1.0))],  # not thick enough; two axes of it
)
def test_other_cases_are_resampled_along_all_axes(spacing, target):
    case = case_of(torch.rand(1, 8, 7, 6), affine=torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64)))
    linear = run(case, {"name": "Spacing", "spacing": target})["image"]
    assert torch.equal(run(case, {"name": "Spacing", "spacing": target, "thick_slices": "nearest"})["image"], linear)


@pytest.mark.parametrize("step", [{"name": "ZScore"}, {"name": "ClipZScore", "lower": 0.2, "upper": 0.8}])
def test_intensities_of_some_channels_only(step):
    voxels = torch.rand(3, 6, 6, 6)
    image = run(case_of(voxels), {**step, "channels": [0, 2]})["image"].as_tensor()
    assert torch.equal(image[1], voxels[1])
    assert torch.equal(image[[0, 2]], run(case_of(voxels[[0, 2]]), step)["image"].as_tensor())
    with pytest.raises(DataError, match=r"image has 3 channel\(s\), but no channel 3 \(numbers start at 0\)"):
        run(case_of(voxels), {**step, "channels": [3]})


def test_an_outlier_beyond_the_percentiles_and_a_constant_image_do_no_harm():
    voxels = torch.arange(1000.0).reshape(1, 10, 10, 10)
    voxels[0, 0, 0, 0] = 1e7
    percentiles = {"name": "ClipZScore", "percentiles": [1, 99]}
    image = run(case_of(voxels), percentiles)["image"]
    assert image.max() < 2  # a uniform distribution reaches sqrt(3)
    assert image.std(correction=0).item() == pytest.approx(1, abs=1e-5)  # float32 sums
    for step in ({"name": "ZScore"}, percentiles):
        assert (run(case_of(torch.full((1, 4, 4, 4), 7.0)), step)["image"] == 0).all()


def test_crop_follows_the_image_and_stays_inside_it():
    voxels = torch.zeros(1, 10, 10, 10)
    voxels[0, 2:5, 0:4, 6:9] = 1
    label = torch.arange(1000.0).reshape(1, 10, 10, 10) % 200
    result = run(case_of(voxels, label), {"name": "CropForeground", "margin": 1})
    assert result["image"].shape == (1, 5, 5, 5)
    assert result["label"].as_tensor().equal(label[:, 1:6, 0:5, 5:10].to(torch.uint8))
    assert result["image"].affine[:3, 3].tolist() == [3.5, -3, 13]
    assert run(case_of(voxels), {"name": "CropForeground", "above": 0.5})["image"].shape == (1, 3, 4, 3)


def test_preprocessing_can_be_sent_to_a_loaders_process(case):
    components = [{"name": "CropForeground", "above": 3.0}, {"name": "ZScore"}, {"name": "Pad", "multiple": 4}]
    preprocessing = build_preprocessing(components)
    sent = pickle.loads(pickle.dumps(preprocessing))
    assert sent(case)["image"].as_tensor().equal(preprocessing(case)["image"].as_tensor())


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"name": "Spcing"}, r"no preprocessing component is called 'Spcing'; did you mean 'Spacing'\?"),
        ({"name": "ZScore", "nonzeros": True}, r"ZScore has no parameter 'nonzeros'; did you mean 'nonzero'\?"),
        ({"name": "Spacing", "spacing": [1, 0, 1]}, "three positive lengths in mm"),
        ({"name": "Spacing", "spacing": [1, 1, 1], "thick_slices": "cubic"}, "linear or nearest, got 'cubic'"),
        ({"name": "Orientation", "axcodes": "RLS"}, "each body axis once, like RAS or LPI, got 'RLS'"),
        ({"name": "ClipZScore"}, "lower < upper or percentiles, got lower=None"),
        ({"name": "ClipZScore", "lower": 3, "upper": 1}, "lower < upper or percentiles, got lower=3, upper=1"),
        ({"name": "ClipZScore", "lower": 0, "upper": 1, "percentiles": [1, 2]}, "lower < upper or percentiles"),
        ({"name": "ClipZScore", "percentiles": [99, 1]}, "two increasing numbers"),
        ({"name": "ClipZScore", "lower": 0, "upper": 1, "mean": 3}, "mean needs a positive std, .* mean=3, std=None"),
        ({"name": "Pad"}, "needed: either size or multiple, got size=None"),
        ({"name": "Pad", "size": [1, 1, 1], "multiple": 2}, "needed: either size or multiple"),
        ({"name": "Pad", "fields": ["image"], "multiple": 2}, "cannot be set"),
    ],
)  # fmt: skip
def test_config_that_cannot_work_is_refused(component, message):
    with pytest.raises(ConfigError, match=message):
        build_preprocessing([component])
    with pytest.raises(ConfigError, match=r"fields with an image first, got \['label'\]"):
        build_preprocessing([], fields=["label"])


def test_padding_is_remembered_and_comes_last():
    image = run(case_of(torch.ones(1, 4, 9, 5)), {"name": "Pad", "size": [8, 8, 8]}, {"name": "ZScore"})["image"]
    assert image.meta["padding"] == ((2, 2), (0, 0), (1, 2))  # the larger side is left
    assert image.shape == (1, 8, 9, 8)
    with pytest.raises(ConfigError, match=r"Pad must follow \['CropForeground', 'Spacing'\]"):
        build_preprocessing(
            [{"name": "Pad", "multiple": 8}, {"name": "Spacing", "spacing": [1, 1, 1]}, {"name": "CropForeground"}]
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"image": torch.rand(1, 10, 12, 14)}, GridError, "image is a Tensor without an affine"),
        ({"image": MetaTensor(torch.rand(1, 2, 2, 2), meta={"space": "LPS"})}, GridError, r"must map to RAS\+"),
        ({"image": MetaTensor(torch.rand(1, 2, 2, 2)), "label": None}, GridError, "label is a NoneType without"),
        ({"image": MetaTensor(torch.rand(10, 12, 14))}, GridError, r"must have shape \(C, D, H, W\)"),
        ({"label": MetaTensor(torch.zeros(1, 10, 12, 13), affine=ORIENTED)}, GridError, "shape .* 13.*, but .* 14"),
        ({"label": MetaTensor(torch.zeros(2, 10, 12, 14), affine=ORIENTED)}, GridError, "one map of label values"),
        ({"label": MetaTensor(torch.zeros(1, 10, 12, 14), affine=ISOTROPIC)}, GridError, "mm away from its image"),
        ({"label": MetaTensor(torch.full((1, 10, 12, 14), 0.5), affine=ORIENTED)}, DataError, "got 0.5; is it a prob"),
        ({"image": MetaTensor(torch.zeros(1, 10, 12, 14), affine=ORIENTED)}, GridError, "no voxel that is not 0"),
    ],
)  # fmt: skip
def test_error_names_the_case_and_what_came(case, change, error, message):
    with pytest.raises(error, match=message) as caught:
        run(case | change, {"name": "CropForeground"})
    assert str(caught.value).startswith("case knee_7: ")


def test_a_missing_image_and_an_error_of_a_transform_name_the_case(case):
    with pytest.raises(DataError, match="case knee_7: Pad failed: "):
        run(case, {"name": "Pad", "size": ["a", "b", "c"]})
    del case["image"]
    with pytest.raises(DataError, match="needs the field 'image', but the case has"):
        run(case)
