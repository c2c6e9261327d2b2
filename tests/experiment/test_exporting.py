"""An exported run predicts what the run predicts, anywhere; every part of the file is checked."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from volseg.config.loading import dump_config
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.archive import read_archive
from volseg.exchange.tensors import pack_tensors, unpack_tensors
from volseg.experiment import RunFolder, export, predict, train
from volseg.experiment.prediction.sources import load_trained
from volseg.files import digest_file
from volseg.inference.postprocessing import Postprocessing, Step


@pytest.fixture(scope="module")
def run(cross_validated):
    """Return the shared folder of a run, fold 0 of the cross-validation."""
    return cross_validated / "fold_0"


@pytest.fixture(scope="module")
def archive(run, tmp_path_factory):
    return export(run, tmp_path_factory.mktemp("exported") / "model.zip", licence="CC-BY-4.0")


def test_equal_runs_give_equal_bytes_and_tell_nothing_of_people(run, archive, task, tmp_path):
    again = export(run, tmp_path / "model.zip", licence="CC-BY-4.0")
    assert again.read_bytes() == archive.read_bytes()
    manifest, members = read_archive(archive)
    assert manifest["licence"] == "CC-BY-4.0"
    assert manifest["scores"][0]["cases"] == 2
    assert 0 <= manifest["scores"][0]["mean"]["1"]["Dice"] <= 1
    [split] = json.loads((run / "split.json").read_text(encoding="utf-8"))
    named = [str(task), str(run), *split["train"], *split["val"]]
    texts = [json.dumps(manifest), *(content.decode() for name, content in members.items() if "weights" not in name)]
    assert not [name for name in named for text in texts if name in text]


def test_a_cross_validation_is_an_ensemble_in_one_file(cross_validated, task, tmp_path):
    file = export(cross_validated, tmp_path / "cv.zip")
    images = sorted((task / "imagesTs").glob("*.nii.gz"))
    by_folder = predict(cross_validated, images, tmp_path / "by_folder").require_all()
    by_file = predict(file, images, tmp_path / "by_file").require_all()
    assert len(load_trained(file).models) == 3
    for case in by_folder:
        assert digest_file(by_folder[case]) == digest_file(by_file[case])


def test_what_was_measured_to_help_goes_along(run, tmp_path):
    own = shutil.copytree(run, tmp_path / "run")
    task = RunFolder(own).task()
    order = Postprocessing.of(task, (Step(operation="keep_largest", values=(1,)),))
    order.save(RunFolder(own).postprocessing_file)
    loaded = load_trained(export(own, tmp_path / "model.zip"))
    assert loaded.postprocessing.steps == order.steps
    best = export(own, tmp_path / "best.zip", checkpoint="best")
    assert load_trained(best, "best").postprocessing is None  # it was measured with the latest one's label maps
    with pytest.raises(ConfigError, match="contains the best checkpoint, not previous; leave out --checkpoint"):
        load_trained(best, "previous")


def rewrite(archive, path, change):
    """Write the archive again with changed members; ``change`` maps names to bytes."""
    with zipfile.ZipFile(archive) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(path, "w") as made:
        for name, content in change(members).items():
            made.writestr(name, content)
    return path


def change_manifest(**changes):
    def change(members):
        manifest = {**json.loads(members["manifest.json"]), **changes}
        return {**members, "manifest.json": json.dumps(manifest).encode()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda members: {**members, "0/task.json": members["0/task.json"] + b" "}, "does not match the hashes"),
        (lambda members: {**members, "0/more.json": b"{}"}, "does not match the hashes"),
        (change_manifest(files=None), "does not match the hashes"),
        (change_manifest(version=3), r"that volseg .* reads .*'version': 2"),
        (change_manifest(format="other"), "reads .*volseg-model"),
        (change_manifest(networks=3), r"has no 1/weights\.safetensors"),
        (change_manifest(networks="many"), "number of networks, got 'many'"),
        (lambda members: {**members, "manifest.json": b"{"}, "is damaged, or volseg export did not write it"),
    ],
)
def test_what_was_changed_is_refused(archive, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        load_trained(rewrite(archive, tmp_path / "changed.zip", change))


def test_a_cut_file_is_refused(archive, tmp_path):
    cut = tmp_path / "cut.zip"
    cut.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match="is not a model; name a run folder of volseg train"):
        load_trained(cut)
    with pytest.raises(CheckpointError, match="is damaged, or volseg export did not write it"):
        read_archive(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"123", "it has only 3 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1099511627776 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "its header cannot be read"),
        (pack_tensors({"a": torch.ones(3)}) + b"surplus", "7 bytes belong to no tensor"),
        (pack_tensors({"a": torch.ones(3)})[:-1], "a should start at byte 0, got 0 to 12"),
        (pack_tensors({"a": torch.ones(3)}).replace(b'"shape":[3]', b'"shape":[9]'), "is damaged: a should start"),
        (pack_tensors({"a": torch.ones(3)}).replace(b"F32", b"F3Z"), "its header cannot be read .*F3Z"),
    ],
)
def test_damaged_tensors_are_refused(content, message):
    with pytest.raises(CheckpointError, match=message):
        unpack_tensors(content, "here")


def test_tensors_of_every_type_come_back_and_are_the_librarys():
    dtypes = (torch.float64, torch.bfloat16, torch.bool)
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    content = pack_tensors(tensors)
    torch.testing.assert_close(dict(unpack_tensors(content, "here")), tensors, rtol=0, atol=0)
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    torch.testing.assert_close(library.load(content), tensors, rtol=0, atol=0)
    torch.testing.assert_close(dict(unpack_tensors(library.save(tensors), "here")), tensors, rtol=0, atol=0)


def test_what_cannot_be_exported_is_told(run, tmp_path):
    with pytest.raises(ConfigError, match=r"an archive needs a file name such as model\.zip, got"):
        export(run, tmp_path)
    with pytest.raises(ConfigError, match="is neither a run folder nor a cross-validation"):
        export(tmp_path, tmp_path / "model.zip")
    with pytest.raises(ConfigError, match="must be one of archive, torchscript, onnx, monai-bundle, got 'onxx'; did"):
        export(run, tmp_path / "model.onnx", to="onxx")
    for format_, name in (("archive", "model.zip"), ("torchscript", "model.pt")):
        (tmp_path / name).write_text("somebody's", encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{name} exists; choose another path, or use --overwrite to replace it"):
            export(run, tmp_path / name, to=format_)
    assert export(run, tmp_path / "model.zip", overwrite=True).read_bytes().startswith(b"PK")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # newer torch says so to whoever loads it
def test_torchscript_gives_the_networks_logits(run, tmp_path):
    file = export(run, tmp_path / "model.pt", to="torchscript")
    script, network = torch.jit.load(file), load_trained(run).models[0]
    for sides in ((16, 16, 16), (24, 16, 32)):
        image = torch.rand(1, 1, *sides)
        with torch.no_grad():
            torch.testing.assert_close(script(image), network(image), rtol=1e-4, atol=1e-5)


def test_onnx_gives_the_networks_logits_or_says_what_is_missing(run, tmp_path):
    try:
        import onnxruntime  # an optional extra
        import onnxscript  # noqa: F401
    except ImportError:
        with pytest.raises(
            ConfigError,
            match=r"ONNX needs packages that are not installed \(onnx.*pip install onnx onnxruntime onnxscript",
        ):
            export(run, tmp_path / "model.onnx", to="onnx")
        return
    session = onnxruntime.InferenceSession(str(export(run, tmp_path / "model.onnx", to="onnx")))
    network, image = load_trained(run).models[0], torch.rand(3, 1, 16, 16, 16)
    with torch.no_grad():
        found = torch.from_numpy(session.run(["logits"], {"image": image.numpy()})[0])
        torch.testing.assert_close(found, network(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("network", ["MONAI's", "ours"])
def test_monai_runs_the_bundle_by_itself(network, run, configured, task, tmp_path):
    if network == "ours":  # which goes in as TorchScript
        spec = "network={name: ResEncUNet, strides: [1, 2], kernel_size: [3, 3], filters: [4, 8], blocks: [1, 1]}"
        windows = "inference.window=[16,16,16]"
        run = train(configured(spec, windows, "training.epochs=1", "training.iterations=2")).folder.path
    bundle = export(run, tmp_path / "bundle", to="monai-bundle")
    command = (
        "import sys; sys.modules['volseg'] = None; from monai.bundle import run; "
        "run(config_file='configs/inference.json', meta_file='configs/metadata.json', dataset_dir=sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", command, str(task / "imagesTs")], cwd=bundle, check=True, timeout=300)
    for case, path in predict(run, [task / "imagesTs"], tmp_path / "ours").require_all().items():
        ours = np.asarray(nib.load(path).dataobj)
        theirs = np.asarray(nib.load(bundle / "eval" / f"{case}_seg.nii.gz").dataobj)
        # Both interpolate probabilities, MONAI by way of its own inverses
        assert (ours == theirs).mean() >= 0.999
    with pytest.raises(ConfigError, match="exists; a MONAI bundle is written to a new folder"):
        export(run, bundle, to="monai-bundle")


def test_a_run_on_several_devices_is_exported_from_one(run, tmp_path):
    own = shutil.copytree(run, tmp_path / "run")
    config = RunFolder(own).config(["parallel={spatial: 2}"])
    dump_config(config, RunFolder(own).config_file)
    assert load_trained(export(own, tmp_path / "model.zip"), overrides=["parallel={}"]).models


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_network_of_any_source_is_exported_and_a_bundle_of_nnunets_is_refused(cross_validated, tmp_path):
    """A bundle would prepare images differently from nnU-Net."""
    stored = Path(__file__).parents[1] / "exchange" / "nnunet" / "model"
    fold = shutil.copytree(stored, tmp_path / "nnunet") / "fold_0"
    declared = json.loads((fold.parent / "dataset.json").read_text(encoding="utf-8"))
    del declared["regions_class_order"]
    declared["labels"] = {"background": 0, "organ": 1}
    (fold.parent / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    archive = export(cross_validated, tmp_path / "model.zip")
    for source in (fold, archive / "fold_1"):
        file = export(source, tmp_path / f"{source.parent.name}.ts", to="torchscript")
        script, network = torch.jit.load(file), load_trained(source, overrides=["device=cpu"]).models[0]
        image = torch.rand(1, load_trained(source).task.num_channels, 16, 32, 32)
        torch.testing.assert_close(script(image), network(image), rtol=1e-4, atol=1e-4)  # as export compares
    with pytest.raises(ConfigError, match="predicts like nnU-Net, which MONAI does not support"):
        export(fold, tmp_path / "bundle", to="monai-bundle")
    with pytest.raises(ConfigError, match=r"contains 3 networks, but onnx can store one; name one fold, .*fold_0"):
        export(archive, tmp_path / "model.onnx", to="onnx")
