"""datasets/ holds facts; what can be checked against another source is."""

import json
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
    known |= {"intensity", "plan", "published", "quirks"}
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


@pytest.mark.real_data
def test_the_hippocampus_manifest_is_what_its_folder_says(msd_task04):
    declared = json.loads((msd_task04 / "dataset.json").read_text(encoding="utf-8"))
    manifest = MANIFESTS["Task04_Hippocampus"]
    assert {int(value): name for value, name in declared["labels"].items()} == manifest["labels"]
    assert list(declared["modality"].values()) == manifest["modalities"]
