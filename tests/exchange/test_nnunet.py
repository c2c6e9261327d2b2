"""Model folders of nnU-Net 2; the one that is stored here, and what nnU-Net predicts with it, made by
``tests/oracles/nnunet_folders.py --store tests/exchange/nnunet``."""

import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from label_maps import crop_padding
from monai.data import MetaTensor
from scipy.ndimage import zoom

from volseg.data.readers import Read
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.exchange.nnunet import is_nnunet_model, read_nnunet
from volseg.exchange.nnunet.folder import read_checkpoint
from volseg.exchange.nnunet.plans import Resampling, compute_thick_axis, read_plan, resample
from volseg.exchange.nnunet.predictor import build_preprocessing
from volseg.experiment import predict
from volseg.experiment.prediction.sources import load_trained
from volseg.inference.original_grid import Decision, LabelRule
from volseg.inference.sampling import Held

STORED = Path(__file__).with_name("nnunet")
CHECKPOINT = STORED / "model" / "fold_0" / "checkpoint_final.pth"


@pytest.fixture
def model(tmp_path):
    """Return a copy of the stored model folder, to be changed."""
    return shutil.copytree(STORED / "model", tmp_path / "model")


def change_plans(model, **changes):
    """Change values of the one configuration, or of the plans (``plans__KEY``)."""
    file = model / "plans.json"
    plans = json.loads(file.read_text(encoding="utf-8"))
    for key, value in changes.items():
        of = plans if key.startswith("plans__") else plans["configurations"]["base"]
        of[key.removeprefix("plans__")] = value
    file.write_text(json.dumps(plans), encoding="utf-8")
    return plans


def change_weights(model, change):
    file = model / "fold_0" / "checkpoint_final.pth"
    with torch.serialization.safe_globals([]):
        content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def test_label_maps_are_nnunets(tmp_path):
    predict(STORED / "model", [STORED / "images"], tmp_path).require_all()
    ours, theirs = (nib.load(folder / "case_0.nii.gz") for folder in (tmp_path, STORED / "theirs"))
    expected = np.asarray(theirs.dataobj)
    assert sorted(np.unique(expected)) == [0, 1, 2]
    # nnU-Net sums logits in float16, so that single voxels on a border may differ.
    assert (np.asarray(ours.dataobj) == expected).mean() >= 0.9999
    np.testing.assert_allclose(ours.affine, theirs.affine, atol=1e-5)


def test_probabilities_are_those_of_the_mean_logits(tmp_path):
    """Nnunet's: logits are averaged and resampled, and the softmax is the last step."""
    predict(STORED / "model", [STORED / "images"], tmp_path, probabilities=True, uncertainty=True).require_all()
    labels = np.asarray(nib.load(tmp_path / "case_0.nii.gz").dataobj)
    found = np.asarray(nib.load(tmp_path / "probabilities" / "case_0.nii.gz").dataobj)
    trained, images = load_trained(STORED / "model"), tuple(sorted((STORED / "images").iterdir()))
    case = trained.preprocessing(Read(["image"])({"case": "case_0", "image": images}))
    blended = trained.build_predictor().probabilities(case["image"].as_tensor()[None])[0]
    decision = Decision(case["image"], LabelRule.of(len(blended), None, regions=False))
    expected, cells = torch.zeros(len(blended), *decision.original.shape), tuple(map(range, decision.source.shape))
    for place, values in decision.sampling.read(Held(crop_padding(decision, blended)), cells, 2**30):
        expected[:, *place] = (values - 0.5).sigmoid() if trained.task.regions else values.softmax(0)
    np.testing.assert_allclose(np.moveaxis(found, -1, 0), expected.numpy(), atol=1e-5)  # of sixteen bits
    uncertain = np.asarray(nib.load(tmp_path / "uncertainty" / "case_0.nii.gz").dataobj)
    assert 0 <= uncertain.min() < uncertain.max() <= 1
    assert uncertain[labels == 0].mean() < uncertain[labels > 0].mean()


def test_a_folder_is_recognised_and_mirrored_as_its_checkpoint_says(model, caplog):
    assert is_nnunet_model(model)
    assert not is_nnunet_model(model / "fold_0")
    (model / "crossval_results_folds_0").mkdir()
    (model / "crossval_results_folds_0" / "postprocessing.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    trained = load_trained(model)
    assert trained.postprocessing is None
    assert "postprocessing.pkl is not applied: it is a pickle" in caplog.text
    assert trained.build_predictor().mirror_axes == (0, 1)
    assert trained.task.regions == {"whole": (1, 2), "core": (2,)}
    assert load_trained(model, overrides=["inference.mirror=false"]).build_predictor().mirror_axes == ()
    with pytest.raises(ConfigError, match=r"windows of its plans' patch size, \[8, 24, 24\], got .*\(32, 32, 32\)"):
        load_trained(model, overrides=["inference.window=[32,32,32]"])


def test_label_maps_of_other_plans_are_not_gone_on_with(model, tmp_path):
    """The weights were the same and the config did not contain the plans, so a folder mixed both."""
    predict(model, [STORED / "images"], tmp_path / "out").require_all()
    file = model / "plans.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"made with other settings \(weights differ\)"):
        predict(model, [STORED / "images"], tmp_path / "out", resume=True)


def test_folds_are_an_ensemble(model):
    shutil.copytree(model / "fold_0", model / "fold_1")
    shutil.copytree(model / "fold_0", model / "fold_all")
    assert read_nnunet(model).folds == ("0", "1")
    assert read_nnunet(model, folds=["all"]).folds == ("all",)
    assert len(load_trained(model).models) == 2
    with pytest.raises(CheckpointError, match=r"has no fold_7/checkpoint_final\.pth; it has folds 0, 1, all"):
        read_nnunet(model, folds=[7])
    with pytest.raises(
        CheckpointError, match=r"no fold with checkpoint_best\.pth; choose from checkpoint_final\.pth by"
    ):
        load_trained(model, checkpoint="best")


def test_models_of_other_plans_do_not_predict_together(model):
    """The images of both were prepared by the first one's plans, without a word."""
    change_plans(model, spacing=[2.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"cannot predict together, as they differ in preprocessing"):
        load_trained([STORED / "model", model])


class Malicious:
    def __reduce__(self):
        return os.system, ("echo harm",)


class Rebuilt:
    """A pickle of numpy's that is more than a number."""

    def __reduce__(self):
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b")


@pytest.mark.parametrize(("harm", "named"), [(Malicious, "system"), (Rebuilt, "_reconstruct")])
def test_a_checkpoint_that_could_run_code_is_refused(model, harm, named):
    change_weights(model, lambda content: content.update(logging=harm()))
    with pytest.raises(CheckpointError, match=f"could run arbitrary code .*{named}.*trainer_name"):
        load_trained(model)


def test_numbers_of_numpy_are_read_and_damaged_files_named(model):
    for number in (np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)):
        change_weights(model, lambda content, number=number: content.update(_best_ema=number))
        assert read_checkpoint(model / "fold_0" / "checkpoint_final.pth").trainer == "nnUNetTrainer"
    file = model / "fold_0" / "checkpoint_final.pth"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"is damaged, or torch\.save did not write it"):
        read_checkpoint(file)
    torch.save({"state_dict": {}}, file)
    with pytest.raises(CheckpointError, match="2, which contains network_weights, init_args, trainer_name"):
        read_checkpoint(file)


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("decoder.transpconvs.0.bias", lambda _: None, r"has no tensor 'decoder\.transpconvs\.0\.bias'"),
        ("encoder.extra.weight", lambda _: torch.zeros(1), r"'encoder\.extra\.weight', which the network of its"),
        ("decoder.seg_layers.1.weight", lambda tensor: torch.zeros(3, *tensor.shape[1:]), r"seg_layers\.1\.weight has"),
        ("decoder.transpconvs.0.weight", torch.Tensor.to_sparse, r"transpconvs\.0\.weight is float32 \(torch"),
        ("decoder.transpconvs.0.bias", lambda _: torch.zeros(1).expand(10**6, 10**6), r"transpconvs\.0\.bias is"),
        ("decoder.encoder.stages.0.0.convs.0.conv.weight", lambda _: torch.ones(1), r"encoder\.stages\.0\.0\.convs"),
    ],
)  # fmt: skip
def test_weights_of_another_network_are_refused(model, ending, change, message):
    def change_all(content):
        weights = content["network_weights"]
        for name in [name for name in weights if name.endswith(ending)] or [ending]:
            weights[name] = change(weights.get(name))
            if weights[name] is None:
                del weights[name]

    change_weights(model, change_all)
    with pytest.raises(CheckpointError, match=message):
        load_trained(model)


ARCHITECTURE = json.loads((STORED / "model" / "plans.json").read_text(encoding="utf-8"))["configurations"]["base"][
    "architecture"
]


def built(name=None, **arguments):
    changed = {**ARCHITECTURE, "arch_kwargs": {**ARCHITECTURE["arch_kwargs"], **arguments}}
    return {**changed, "network_class_name": name} if name else changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": [24, 24]}, r"is not a 3D configuration \(patch_size \[24, 24\]\); name the folder of 3d"),
        ({"previous_stage": "3d_lowres"}, "second stage of a cascade, which also needs the label maps of 3d_lowres"),
        ({"preprocessor_name": "MyPreprocessor"}, "preprocesses with MyPreprocessor; supported"),
        ({"plans__image_reader_writer": "NaturalImage2DIO"}, "reads images by NaturalImage2DIO"),
        ({"normalization_schemes": ["CTNormalization", "MyScheme"]}, "normalises by MyScheme; .*CTNormalization"),
        ({"resampling_fn_data": "my_resampling"}, "resampling_fn_data names 'my_resampling'"),
        ({"resampling_fn_probabilities_kwargs": {"order": 3}}, "uses splines of order 3; supported: 1"),
        ({"resampling_fn_data_kwargs": {"ordr": 3}}, "the argument 'ordr', which is not supported"),
        ({"architecture": built("a.b.Primus")}, "names the network Primus; .*PlainConvUNet, Residual"),
        ({"architecture": built(norm_op="torch.nn.BatchNorm3d")}, "norm_op: 'torch.nn.BatchNorm3d'"),
        ({"architecture": built(dropout_op="torch.nn.Dropout3d")}, "dropout_op: 'torch.nn.Dropout3d'"),
        ({"architecture": built(nonlin_kwargs={"negative_slope": 0.2})}, "a leaky ReLU of slope 0.01"),
        ({"architecture": built(squeeze=True)}, "the parameter 'squeeze', which is not supported"),
        # The first two were passed over; the rest ended in a traceback.
        ({"plans__label_manager": "MyOwn"}, "label manager MyOwn; supported: LabelManager"),
        ({"plans__transpose_backward": [2, 2, 2]}, r"transpose_backward should undo transpose_forward .*got \[2, 2, 2"),
        ({"plans__transpose_forward": [0, None, 1]}, "should be an order of 0, 1, 2, got .0, None, 1"),
        ({"plans__transpose_forward": [0, 1, 1]}, r"transpose_forward should be an order of 0, 1, 2, got \[0, 1, 1\]"),
        ({"plans__image_reader_writer": ["SimpleITKIO"]}, "differs from what nnU-Net 2 writes, and cannot be read"),
        ({"resampling_fn_data_kwargs": "x"}, "differs from what nnU-Net 2 writes, and cannot be read"),
        ({"architecture": built(strides=[[1, 2, 2]] * 2 + [[2, 2, 2]])}, r"a first stage of stride \[1, 2, 2\]"),
        ({"architecture": built(features_per_stage=[4, -1, 8])}, r"with filters \[4, -1, 8\]; needed: 3"),
        ({"architecture": built(kernel_sizes=[[1, 3, None]] * 3)}, "with kernel_size .*needed: 3"),
        ({"architecture": built(n_stages="x")}, "with .x. stages; needed: 2 to 32"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(model, changes, message):
    change_plans(model, **changes)
    with pytest.raises((ConfigError, DataError), match=message):
        load_trained(model)


def test_trainers_with_another_network_are_refused_and_others_are_not(model):
    change_weights(model, lambda content: content.update(trainer_name="nnUNetTrainerBN"))
    with pytest.raises(ConfigError, match="trained by nnUNetTrainerBN, whose network differs from its plans"):
        load_trained(model)
    change_weights(model, lambda content: content.update(trainer_name="OurTrainer"))
    assert read_nnunet(model).folds


def test_plans_of_before_describe_the_same_network(model):
    plain, arguments = read_plan(model / "plans.json", "3d_fullres"), ARCHITECTURE["arch_kwargs"]
    plans = change_plans(
        model,
        UNet_class_name="PlainConvUNet",
        UNet_base_num_features=4,
        unet_max_num_features=8,
        n_conv_per_stage_encoder=[2, 2, 2],
        n_conv_per_stage_decoder=[2, 2],
        pool_op_kernel_sizes=arguments["strides"],
        conv_kernel_sizes=arguments["kernel_sizes"],
    )
    del plans["configurations"]["base"]["architecture"]
    (model / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    old = read_plan(model / "plans.json", "3d_fullres")
    assert dict(old.network) == {**plain.network, "filters": [4, 8, 8]}


def test_damaged_plans_and_regions_without_an_order_are_refused(model):
    """The regions were painted in an order of our own, where nnU-Net predicts nothing."""
    file = model / "dataset.json"
    declared = json.loads(file.read_text(encoding="utf-8"))
    del declared["regions_class_order"]
    file.write_text(json.dumps(declared), encoding="utf-8")
    with pytest.raises(DataError, match="declares regions but no regions_class_order"):
        load_trained(model)
    (model / "plans.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="should contain nnU-Net's plans"):
        load_trained(model)


SPLINES = Resampling(order=3, separates=None)


@pytest.mark.parametrize("shape", [(15, 9, 20), (5, 13, 8), (10, 7, 31)])
@pytest.mark.parametrize("order", [1, 3])
def test_splines_are_scipys(shape, order):
    volume = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 10, 13, 17))).float()
    factors = np.divide(shape, volume.shape[1:])
    expected = [zoom(one, factors, order=order, mode="nearest", grid_mode=True) for one in volume.double().numpy()]
    expected = [made.clip(one.min(), one.max()) for made, one in zip(expected, volume.numpy(), strict=True)]
    found = resample(volume, shape, Resampling(order=order), None)
    # float32 of values of order one
    np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)


def test_thick_slices_are_resampled_in_their_planes_and_repeated():
    volume = torch.rand(1, 4, 9, 9)
    found = resample(volume, (8, 12, 12), SPLINES, 0)
    for number in range(8):  # two of the new planes lie in each old one
        old = volume[0, number // 2].double().numpy()
        plane = zoom(old, 12 / 9, order=3, mode="nearest", grid_mode=True).clip(old.min(), old.max())
        np.testing.assert_allclose(found[0, number].numpy(), plane, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "before", "after", "axis"),
    [
        (SPLINES, (5, 1, 1), (2, 1, 1), 0),
        (SPLINES, (1, 1, 2), (1, 1, 4), 2),
        (SPLINES, (3, 1, 1), (2, 1, 1), None),
        (SPLINES, (4, 4, 1), (1, 1, 1), None),
        (Resampling(separates=False), (9, 1, 1), (1, 1, 1), None),
        (Resampling(separates=True), (1, 2, 1), (1, 1, 1), 1),
    ],
)
def test_thick_axes_are_nnunets(rule, before, after, axis):
    assert compute_thick_axis(rule, before, after) == axis


def prepare(model, voxels):
    image = MetaTensor(voxels, affine=torch.eye(4))
    plan = read_plan(model / "plans.json", "3d_fullres")
    return build_preprocessing(plan)({"case": "one", "image": image})["image"]


def test_images_are_cropped_and_moments_are_those_inside_with_holes(model):
    change_plans(model, spacing=[1.0, 1.0, 1.0])
    voxels = torch.zeros(2, 9, 9, 9)
    voxels[:, 2:7, 2:7, 2:7] = torch.rand(2, 5, 5, 5) + 5
    voxels[:, 4, 4, 4] = 0  # enclosed: inside, as nnU-Net fills it
    prepared = prepare(model, voxels).as_tensor()
    assert prepared.shape == (2, 5, 5, 5)  # cropped to what is not 0
    for channel in prepared:
        assert abs(channel.mean()) < 1e-5
        assert abs(channel.std(correction=0) - 1) < 1e-5
    assert prepare(model, torch.zeros(2, 6, 7, 8)).shape == (2, 8, 7, 6)  # not cropped; slowest axis first
    with pytest.raises(DataError, match=r"case one: the image has 1 channel\(s\), but the plans normalise 2"):
        prepare(model, torch.rand(1, 8, 8, 8))
