import logging
from pathlib import Path

import pytest
import yaml

from volseg.data.cases import Task
from volseg.evaluation.scoring import published_results

FOLDER = Path(__file__).parents[2] / "datasets" / "msd"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def task_of(name, labels):
    return Task(name=name, root=Path("x"), modalities=("MRI",), labels=labels, training=(), test=())


def test_the_hippocampus_beside_its_sources():
    results = published_results(
        task_of("Task04_Hippocampus", {0: "background", 1: "anterior", 2: "Posterior"})
    )  # spelt otherwise, the same label
    nnunet = results[0]
    assert nnunet["method"] == "nnU-Net 3d_fullres"
    assert "cross-validation" in nnunet["evaluation"]
    assert nnunet["num_cases"] == 260
    assert nnunet["dice"] == {1: 0.8975, 2: 0.8807}
    assert nnunet["source"] == "Project-MONAI/tutorials, modules/dynunet_pipeline/README.md"
    assert [result["num_cases"] for result in results if "cross-validation" not in result["evaluation"]] == [130, 130]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_gives_its_rows(name):
    manifest = MANIFESTS[name]
    results = published_results(task_of(name, manifest["labels"]))
    assert [result["method"] for result in results] == [row["method"] for row in manifest["published"]]
    for result in results:
        is_crossed = "cross-validation" in result["evaluation"]
        assert result["num_cases"] == manifest["num_training" if is_crossed else "num_test"]
        assert is_crossed or result["evaluation"] == "challenge test set"


@pytest.mark.parametrize("name", ["Task00_Synthetic", "../msd/Task04_Hippocampus", "", "*"])
def test_a_task_without_manifest_has_none(name):
    assert published_results(task_of(name, {0: "background", 1: "Anterior", 2: "Posterior"})) == []


@pytest.mark.parametrize(
    "labels", [{0: "background", 1: "hippocampus"}, {0: "background", 1: "Posterior", 2: "Anterior"}]
)
def test_other_labels_are_not_compared(labels, caplog):
    with caplog.at_level(logging.WARNING):
        assert published_results(task_of("Task04_Hippocampus", labels)) == []
    assert "published results of Task04_Hippocampus are about labels" in caplog.text
