"""Every source opens by its path; a model in memory gives the label maps that ``volseg predict`` writes."""

import gc
import json
import logging
import shutil
import threading
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from monai.data import MetaTensor
from monai.transforms import Flip

import volseg
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment import RunFolder, predict
from volseg.experiment.prediction.exporting import export
from volseg.experiment.prediction.loaded import Segmentation
from volseg.experiment.prediction.sources import load_trained
from volseg.workflow import load_checkpoint

NNUNET = Path(__file__).parents[1] / "exchange" / "nnunet"


@pytest.fixture(scope="module")
def image(task):
    """Return the path of an image that no training saw."""
    return next((task / "imagesTs").glob("*.nii.gz"))


@pytest.fixture(scope="module")
def model(trained):
    return volseg.load(trained.folder.path, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def predicted(trained, image, tmp_path_factory):
    """Return the label map of ``volseg predict`` for the image."""
    folder = tmp_path_factory.mktemp("predicted")
    made = predict(trained.folder.path, image, folder, overrides=["device=cpu"], probabilities=True).require_all()
    return nibabel.load(next(iter(made.values()))), nibabel.load(next((folder / "probabilities").iterdir()))


def test_every_kind_of_image_gives_the_bits_that_predict_writes(model, image, predicted, tmp_path):
    expected = np.asarray(predicted[0].dataobj)
    assert len(np.unique(expected)) > 1
    file, volume, loaded = volseg.read_volume(image), volseg.read_volume(image), nibabel.load(image)
    for given in (image, str(image), volume):
        labels = model(given).labels
        assert isinstance(labels, MetaTensor)
        assert np.array_equal(labels[0].numpy(), expected)
        torch.testing.assert_close(labels.affine, volume.affine, rtol=0, atol=0)
    assert torch.equal(file.as_tensor(), volume.as_tensor())  # an image is never written to

    labels = model(loaded).labels
    assert labels.to_bytes() == predicted[0].to_bytes()  # header too
    in_memory = nibabel.Nifti1Image.from_bytes(loaded.to_bytes())
    assert model(in_memory).labels.to_bytes() == predicted[0].to_bytes()

    array = model(np.asarray(loaded.dataobj), loaded.affine).labels
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, expected)
    tensor = model(volume.as_tensor(), volume.affine).labels
    assert type(tensor) is torch.Tensor
    assert np.array_equal(tensor.numpy(), expected)


def test_an_image_of_simpleitk_comes_back_as_one_on_its_grid(model, trained, image, tmp_path):
    loaded = nibabel.load(image)
    turned = SimpleITK.GetImageFromArray(np.asarray(loaded.dataobj, dtype=np.float32).transpose(2, 1, 0))
    turned.SetSpacing((1.1, 0.9, 1.3))
    turned.SetOrigin((-20.0, 7.5, 3.25))
    turned.SetDirection((0, -1, 0, 1, 0, 0, 0, 0, 1))
    SimpleITK.WriteImage(turned, str(tmp_path / "turned.mha"))
    made = predict(trained.folder.path, tmp_path / "turned.mha", tmp_path / "out", overrides=["device=cpu"])
    expected = np.asarray(nibabel.load(made.label_maps["turned"]).dataobj)
    found = model(turned)
    assert np.array_equal(SimpleITK.GetArrayFromImage(found.labels).transpose(2, 1, 0), expected)
    for place in ("GetSpacing", "GetOrigin", "GetDirection", "GetSize"):
        assert getattr(found.labels, place)() == getattr(turned, place)()
    voxel = 1.1 * 0.9 * 1.3 / 1000
    assert found.volumes == pytest.approx({n: voxel * (expected == v).sum() for v, n in found.names.items()})


def test_probabilities_names_and_volumes(model, image, predicted):
    found = model(image, probabilities=True)
    assert isinstance(found, Segmentation)
    assert found.names == {1: "Anterior", 2: "Posterior"}
    assert found.outputs == ("background", "Anterior", "Posterior")
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(predicted[1].dataobj), -1, 0), found.probabilities.numpy(), atol=1 / 65535
    )
    assert torch.equal(found.probabilities.argmax(0), found.labels[0].long())
    labels = np.asarray(predicted[0].dataobj)
    voxel = abs(np.linalg.det(predicted[0].affine[:3, :3])) / 1000
    assert found.volumes == pytest.approx({"Anterior": voxel * (labels == 1).sum(),
                                           "Posterior": voxel * (labels == 2).sum()})  # fmt: skip
    assert model(image).probabilities is None


def test_mirror_folds_and_every_source_that_predicts(cross_validated, trained, image, tmp_path):
    archive = export(cross_validated, tmp_path / "model.zip")
    runs, overrides = [cross_validated / "fold_0", cross_validated / "fold_2"], ["device=cpu", "inference.mirror=true"]
    made = predict(runs, image, tmp_path / "out", overrides=overrides, probabilities=True)
    expected = nibabel.load(next((made.folder / "probabilities").iterdir())).get_fdata()
    for source in (cross_validated, archive):
        found = volseg.load(source, folds=[0, 2], mirror=True, device="cpu")(image, probabilities=True)
        np.testing.assert_allclose(np.moveaxis(found.probabilities.numpy(), 0, -1), expected, atol=1 / 65535)
    one, other = (volseg.load(source, device="cpu") for source in (cross_validated / "fold_1", archive / "fold_1"))
    assert torch.equal(one(image, probabilities=True).probabilities, other(image, probabilities=True).probabilities)
    for source, wanted, message in ((archive, [7], "has no fold_7; it has fold_0, fold_1, fold_2"),
                                    (cross_validated, [], "folds must name folds of one source")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            volseg.load(source, folds=wanted)
    with pytest.raises(ConfigError, match=r"device should be auto, cpu, cuda, or cuda:N of \d GPUs, got cuda:99"):
        volseg.load(trained.folder.path, device="cuda:99")


def test_nnunets_model_gives_what_nnunet_predicts(tmp_path):
    images = tuple(sorted((NNUNET / "images").iterdir()))
    expected = np.asarray(nibabel.load(NNUNET / "theirs" / "case_0.nii.gz").dataobj)
    alone = shutil.copy(NNUNET / "model" / "fold_0" / "checkpoint_final.pth", tmp_path)
    found = [volseg.load(source, device="cpu")(images) for source in (NNUNET / "model", alone)]
    for one in found:
        assert (one.labels[0].numpy() == expected).mean() >= 0.9999  # nnU-Net sums logits in float16
        assert one.volumes["whole"] > one.volumes["core"] > 0  # regions that overlap
    assert torch.equal(found[0].labels, found[1].labels)


def test_weights_only_cannot_predict(trained, tmp_path):
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "plain.pt")
    with pytest.raises(ConfigError, match=r"plain\.pt contains only weights: no config describes"):
        volseg.load(tmp_path / "plain.pt")
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"bad\.pt is damaged"):
        volseg.load(tmp_path / "bad.pt")


def test_threads_that_call_one_model_get_what_one_gets(model, task):
    images = sorted((task / "imagesTr").glob("*.nii.gz"))
    expected = {path: model(path).labels for path in images}
    found = {}

    def segment(path):
        found[path] = model(path).labels

    threads = [threading.Thread(target=segment, args=[path]) for path in images]
    before = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_num_threads() == before
    assert len(found) == len(images)
    assert all(torch.equal(found[path], expected[path]) for path in images)


def list_tensors():
    """Return all tensors alive, by their identity."""
    gc.collect()
    return {id(one): one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}


def test_ten_calls_hold_no_more_tensors_than_one(model, image):
    """Count the bytes of the tensors that the calls leave: no allocator and no other process changes that number.

    Tensors of other tests stay out of the count, fake ones without a storage among them.
    """
    others = list_tensors()

    def count():
        storages = [one.untyped_storage() for key, one in list_tensors().items() if key not in others]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    model(image)
    before = count()
    for _ in range(10):
        model(image)
    assert count() <= before


def shear(affine):
    """Return an affine with an invalid last row."""
    return affine + np.eye(4)[3][:, None] * [0.001, 0, 0, 0]


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda v: (v.numpy(), None), "given as ndarray needs an affine"),
        (lambda v: (v, np.eye(4)), "given as MetaTensor has its own affine: pass no other one"),
        (lambda v: (v.numpy(), np.eye(3)), r"should be 4 x 4 .* got the shape \(3, 3\)"),
        (lambda v: (v.numpy(), np.diag([0, 0, 0, 1])), "does not place voxels in three dimensions"),
        (lambda v: (torch.zeros(4, 4), torch.eye(4)), "must have three axes"),
        (lambda v: (torch.zeros(1, 8, 8, 8), torch.eye(4)), "is constant"),
        (lambda v: (torch.full((1, 8, 8, 8), torch.nan), torch.eye(4)), "the image in memory .*NaN"),
        (lambda v: (torch.cat([v, v]).as_tensor(), np.eye(4)), r"has 2 channel\(s\).*, but the task declares 1"),
        (lambda v: (v.numpy().astype(complex), np.eye(4)), "stores voxels of type complex"),
        (lambda v: (object(), None), "an image should be a path, .* got object"),
        (lambda v: ("gone.nii.gz", None), "does not exist"),
        (lambda v: (Flip(0)(v.clone()), None), "transforms were applied"),
        (lambda v: (Flip(0, lazy=True)(v.clone()), None), "transforms were applied"),
        (lambda v: (v[:, 1:], None), "transforms were applied"),
        (lambda v: (v[:, :0], None), r"shape \(C, D, H, W\)"),
        (lambda v: (v.to(torch.complex64), None), "dense, real"),
        (lambda v: (v.as_tensor().to_sparse(), v.affine), "dense, real"),
        (lambda v: (v.as_tensor().to("meta"), v.affine), "dense, real"),
        (lambda v: (v.as_tensor(), v.affine.T), "must be transposed"),
        (lambda v: (v.as_tensor(), 2 * v.affine), "last row of an affine"),
        (lambda v: (v.numpy(), shear(v.affine.numpy())), "last row of an affine"),
        (lambda v: (v.numpy(), "abc"), "4 x 4 numbers"),
        (lambda v: (v.numpy(), [[1, 0], [1]]), "4 x 4 numbers"),
        (lambda v: ([v.numpy(), v.numpy()], None), "stack arrays"),
        (lambda v: (np.ma.masked_array(v.numpy(), mask=v.numpy() > 0), v.affine), "masked array"),
    ],
)
def test_an_image_whose_place_or_values_are_unclear_is_refused(give, message, model, image):
    with pytest.raises(DataError, match=message):
        model(*give(volseg.read_volume(image)))


def test_tensors_that_numpy_does_not_know_are_taken(model, image):
    volume = volseg.read_volume(image)
    half = volume.as_tensor().bfloat16()
    affine = volume.affine.clone().requires_grad_()
    assert torch.equal(model(half, affine).labels, model(half.float(), volume.affine).labels)
    assert torch.equal(model(volume.clone().requires_grad_()).labels, model(volume).labels)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("run", {"mirror": "no way"}, "inference.mirror"),
        ("run", {"device": 0}, "got '?0"),
        ("run", {"overrides": [3]}, "--set 3 does not apply"),
        (None, {}, "source should be a path"),
        (["run", 3], {}, "source should be a path"),
    ],
)
def test_arguments_of_another_type_are_refused(source, options, message, trained):
    with pytest.raises(ConfigError, match=message):
        volseg.load(trained.folder.path if source == "run" else source, **options)


def test_what_predict_warns_of_is_logged(model, image, tmp_path, caplog):
    loaded = nibabel.load(image)
    loaded.set_sform(np.diag([-1, 1, 1, 1]) @ loaded.affine, code=1)
    loaded.set_qform(nibabel.load(image).affine, code=1)
    model(nibabel.Nifti1Image.from_bytes(loaded.to_bytes()))
    assert "sform and qform" in caplog.text


@pytest.fixture
def folds(cross_validated):
    """Return the folders of three runs; they may not be changed."""
    return [cross_validated / f"fold_{number}" for number in range(3)]


@pytest.fixture
def changed(folds, tmp_path):
    """Return a copy of the first run with another text in one file."""

    def change(name, before, after):
        copy = tmp_path / "changed"
        shutil.copytree(folds[0], copy)
        text = (copy / name).read_text(encoding="utf-8")
        assert before in text
        (copy / name).write_text(text.replace(before, after), encoding="utf-8")
        return copy

    return change


def test_folds_and_several_runs_are_an_ensemble(cross_validated, folds, caplog):
    with caplog.at_level(logging.INFO):
        trained = load_trained(cross_validated)
    assert f"{cross_validated}: ensemble of fold(s) 0, 1, 2 of 3" in caplog.text
    assert trained.source == cross_validated
    alone = [load_trained(RunFolder(fold)) for fold in folds]
    for one, of_fold in zip(trained.models, alone, strict=True):
        torch.testing.assert_close(one.state_dict(), of_fold.models[0].state_dict(), rtol=0, atol=0)
    assert len({trained.weights, *(one.weights for one in alone)}) == 4
    assert load_trained([str(folds[0]), folds[1], RunFolder(folds[2])]).weights == trained.weights
    assert load_trained(folds[:2]).weights != load_trained(folds[1::-1]).weights


def test_a_fold_that_is_not_finished_is_left_out_and_named(cross_validated, tmp_path, caplog):
    copy = shutil.copytree(cross_validated, tmp_path / "cv")
    (copy / "fold_1" / "validation" / "summary.json").unlink()
    assert len(load_trained(copy).models) == 2

    assert "unfinished fold(s) 1 are not used" in caplog.text
    config = copy / "fold_2" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    (copy / "fold_0" / "checkpoints" / "latest.pt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"no fold of .*cv is finished \(started: 0, 1, 2\); continue with volseg"):
        load_trained(copy)


def test_the_checkpoint_and_the_settings_hold_for_all(cross_validated, folds):
    best = load_trained(cross_validated, "best", ["inference.mirror=true", "training.precision=fp32"])
    assert best.config.inference.mirror
    assert best.config.training.precision == "fp32"
    state = load_checkpoint(folds[1] / "checkpoints" / "best.pt")
    assert state.progress == (1, 0)
    with pytest.raises(ConfigError, match="checkpoint must be one of latest, best, previous, got 'final'"):
        load_trained(cross_validated, "final")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*previous\.pt.*--checkpoint latest or best"):
        load_trained(cross_validated, "previous")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.channels=[4]", r"--set network\.channels=\[4\] does not apply to a trained network"),
        ("preprocessing=[]", "does not apply to a trained network"),
        ("training.epochs=3", r"inference, device, parallel, training\.precision"),
        ("inference.miror=true", "did you mean 'mirror'"),
        ("inference.overlap=2", "less than 1"),
        ("device", "needs key=value"),
    ],
)
def test_what_the_training_settled_cannot_be_set(folds, override, message):
    with pytest.raises(ConfigError, match=message):
        load_trained(folds[0], overrides=[override])


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("task.json", '"Anterior"', '"Front"', r"as they differ in labels \("),
        ("config.yaml", "- 1.5", "- 2.0", r"they differ in preprocessing \("),
        ("config.yaml", "mirror: false", "mirror: true", r"they differ in inference \(.*can be set for all with --set"),
    ],
)
def test_runs_that_do_not_go_together_say_in_what(folds, changed, file, before, after, message):
    other = changed(file, before, after)
    with pytest.raises(ConfigError, match=message):
        load_trained([folds[1], other])
    if before == "mirror: false":
        assert len(load_trained([folds[1], other], overrides=["inference.mirror=true"]).models) == 2


def test_regions_in_another_order_are_other_outputs(folds, tmp_path):
    """Their probabilities were averaged, of one region with those of another: equal dicts have any order."""
    runs, values = [], {"whole": [1, 2], "front": [1], "back": [2]}  # three, as the network has outputs
    for number, order in enumerate([("whole", "front", "back"), ("whole", "back", "front")]):
        runs.append(shutil.copytree(folds[0], tmp_path / str(number)))
        task = json.loads((runs[-1] / "task.json").read_text(encoding="utf-8"))
        task["regions"] = {name: values[name] for name in order}
        (runs[-1] / "task.json").write_text(json.dumps(task), encoding="utf-8")
    load_trained(runs[0])
    with pytest.raises(ConfigError, match=r"they differ in regions \("):
        load_trained(runs)


def test_what_is_none_of_them_is_refused(tmp_path):
    (tmp_path / "todo.txt").write_text("train", encoding="utf-8")
    for source, message in (
        (tmp_path / "gone", r"gone does not exist; name a run folder"),
        (tmp_path / "todo.txt", r"todo\.txt is not a model; name a run folder"),
        (tmp_path, r"is not a model; name a run folder .*a model folder of nnU-Net 2"),
        ([], r"got \[\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_trained(source)
