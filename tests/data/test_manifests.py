"""The facts in datasets/ agree with other sources."""

import json
import math
from pathlib import Path

import pytest
import yaml
from monai.apps.datasets import DecathlonDataset

FOLDER = Path(__file__).parents[2] / "datasets" / "msd"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def test_all_ten_tasks_are_there():
    assert list(MANIFESTS) == sorted(DecathlonDataset.resource)


@pytest.mark.parametrize("name", MANIFESTS)
def test_address_and_checksum_are_monais(name):
    manifest = MANIFESTS[name]
    assert manifest["name"] == name
    assert manifest["url"] == DecathlonDataset.resource[name]
    assert manifest["md5"] == DecathlonDataset.md5[name]


@pytest.mark.parametrize("name", MANIFESTS)
def test_fields_agree_with_each_other(name):
    manifest = MANIFESTS[name]
    known = {"name", "url", "md5", "licence", "modalities", "tensor_image_size", "labels", "num_training", "num_test"}
    known |= {"intensity", "nnunet", "nsd_tolerance", "plan", "published", "quirks", "stored"}
    assert set(manifest) <= known
    assert (len(manifest["modalities"]) > 1) == (manifest["tensor_image_size"] == "4D")
    assert list(manifest["labels"]) == list(range(len(manifest["labels"])))
    assert manifest["labels"][0] == "background"
    assert ("CT" in manifest["modalities"]) == ("intensity" in manifest)
    assert len(manifest["plan"]["patch"]) == len(manifest["plan"]["spacing"]) == 3
    for result in manifest["published"]:
        assert set(result) == {"method", "evaluation", "dice", "source"}
        assert list(result["dice"]) == list(manifest["labels"])[1:]
        assert all(0 < dice < 1 for dice in result["dice"].values())


@pytest.mark.parametrize("name", MANIFESTS)
def test_nnunets_plan_is_whole_and_agrees_with_monais(name):
    manifest = MANIFESTS[name]
    plan = manifest["nnunet"]
    assert len(plan["strides"]) == len(plan["kernels"]) == len(plan["filters"])
    assert all(len(of) == 3 for of in (plan["patch"], plan["spacing"], *plan["strides"], *plan["kernels"]))
    divisors = [math.prod(stride[axis] for stride in plan["strides"]) for axis in range(3)]
    assert not any(side % divisor for side, divisor in zip(plan["patch"], divisors, strict=True))
    found = plan["fingerprint"]
    assert len(found["intensities"]) == len(manifest["modalities"])
    for channel in found["intensities"]:
        assert channel["min"] <= channel["percentile_00_5"] <= channel["median"] <= channel["percentile_99_5"]
    assert found["median_spacing"][:2] == plan["spacing"][:2]
    assert found["median_spacing"][2] >= plan["spacing"][2]
    # MONAI rounds, and plans HepaticVessel and Colon for an older nnU-Net.
    assert plan["spacing"] == pytest.approx(manifest["plan"]["spacing"], abs=0.02)


@pytest.mark.real_data
def test_the_hippocampus_manifest_is_what_its_folder_says(msd_task04):
    declared = json.loads((msd_task04 / "dataset.json").read_text(encoding="utf-8"))
    manifest = MANIFESTS["Task04_Hippocampus"]
    assert {int(value): name for value, name in declared["labels"].items()} == manifest["labels"]
    assert list(declared["modality"].values()) == manifest["modalities"]
