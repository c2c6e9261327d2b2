"""Code in the pages: Python runs, page by page; YAML, JSON and TOML load.

A block that is not run says why (``documented``), and the number of these is counted here: it only shrinks. The pages
about components of one's own, fine-tuning, labels and layouts have tests of their own besides, which know what must
come of them.
"""

import gzip
import json
import os
import re
import shutil
import threading
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml
from annotated_tasks import make_annotated_task
from documented import LANGUAGES, PAGES, ROOT, Block, name_page, read_blocks
from torch import nn
from typer.testing import CliRunner

import volseg
from volseg.cli import app
from volseg.config.loading import load_config
from volseg.data import load_task
from volseg.data.case_store.preprocessed import prepare_all
from volseg.data.mock_msd import make_mock_task
from volseg.data.synthetic import make_task
from volseg.experiment.building import check_components
from volseg.transforms.preprocessing import build_preprocessing

NOT_RUN = {"README.md": 1, "docs/install.md": 4, "docs/pipeline.md": 1, "docs/spatial.md": 2, "docs/tutorial.md": 4}
"""Blocks that say that they are not run, by page. A new one needs a reason that no other machine would take away."""

OF_THEIR_OWN = {"docs/own-components.md", "docs/fine-tuning.md"}
"""Pages whose blocks are files that belong together; ``test_own_components.py`` runs them."""

SMALL = {
    "name": "small",
    "preprocessing": [{"name": "Orientation"}, {"name": "ZScore"}],
    "patch": {"size": [16, 16, 16], "batch": 1},
    "network": {"name": "UNet", "channels": [4, 8], "strides": [2]},
    "optimizer": {"name": "SGD", "lr": 0.01},
    "training": {"epochs": 1, "iterations": 1},
    "evaluation": {"distances": False},
}


def run(*words: object) -> None:
    """Run a command of volseg in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, (words, result.output, result.exception)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a folder with the data sets, configs, trained runs and predictions that pages name."""
    folder = tmp_path_factory.mktemp("made")
    task = make_mock_task(folder / "Task04_Hippocampus", "Task04_Hippocampus", num_cases=5, num_test=2, scale=0.5)
    rename_cases(task, "synthetic", "hippocampus")
    make_task(folder / "Task00_Synthetic", num_cases=4, num_test=0)
    make_annotated_task(folder / "Task01_BrainTumour", "regions", num_cases=2)
    for name in ("imagesTs", "labelsTr"):
        (folder / name).symlink_to(task / name)
    (folder / "DIR").mkdir()
    (folder / "DIR" / "Task04_Hippocampus").symlink_to(task)
    (folder / "configs").mkdir()
    config = folder / "configs" / "task04_unet.yaml"
    config.write_text(yaml.safe_dump({**SMALL, "data": {"root": str(task)}, "device": "cpu"}), encoding="utf-8")
    run("train", config, "-o", folder / "runs" / "my_task")
    run("predict", folder / "runs" / "my_task", task / "imagesTr", "-o", folder / "predictions", "--probabilities")
    probabilities = folder / "predictions" / "probabilities"
    (probabilities / "CASE.nii.gz").symlink_to(probabilities / "hippocampus_001.nii.gz")
    run("postprocess", folder / "runs" / "my_task")
    shutil.copytree(folder / "runs" / "my_task", folder / "runs" / "task04_cv")
    return folder


def rename_cases(task: Path, before: str, after: str) -> None:
    """Give the cases of a data set the names that pages call them by."""
    for image in [*task.glob("*/*.nii.gz")]:
        image.rename(image.with_name(image.name.replace(before, after)))
    said = task / "dataset.json"
    said.write_text(said.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


def small_net() -> nn.Module:
    """Return a network of three classes, small enough for every page."""
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 1))


def small_batches() -> list[Any]:
    """Return two batches of pairs."""
    return [(torch.randn(2, 1, 16, 16, 16), torch.randint(3, (2, 16, 16, 16))) for _ in range(2)]


def prepared_cases() -> list[Any]:
    """Return two cases of the twin, prepared."""
    steps = build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}])
    return prepare_all(load_task("Task04_Hippocampus").training[:2], steps, keep_reference=True)


def spatial_loop() -> dict[str, Any]:
    """Return the variables of a training loop over slabs, on two devices that are this CPU."""
    model = volseg.ModelParallel(small_net(), strategy="spatial", devices=["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "batches": small_batches(), "criterion": nn.CrossEntropyLoss()}


# What a page takes for granted, as its words do: "a network", "your loader".
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": lambda: {
        "net": (net := small_net()),
        "optimizer": torch.optim.AdamW(net.parameters()),
        "loader": [{"image": image, "label": label[:, None]} for image, label in small_batches()],
    },
    "docs/augmentation.md": lambda: {"config": load_config("configs/task04_unet.yaml"), "cases": prepared_cases()},
    "docs/pipeline.md": lambda: {"net": small_net(), "loader": small_batches(), "objective": nn.CrossEntropyLoss()},
    "docs/prediction.md": lambda: {
        "network": nn.Conv3d(1, 3, 1),
        "cases": prepared_cases(),
        "label_map": torch.ones(1, 8, 8, 8, dtype=torch.uint8),
        "folder": Path("written"),
    },
    "docs/spatial.md": spatial_loop,
    "docs/what-fits.md": lambda: {"net": small_net()},
}


def planned_patch_is_written(names: dict[str, Any]) -> None:
    """The config that a page of planning writes has the patch that was planned."""
    assert load_config("my_task.yaml").patch.size == names["planned"].geometry.patch


def loss_takes_regions(names: dict[str, Any]) -> None:
    """The loss that a page builds is a number of logits of as many outputs as the task has."""
    logits = torch.randn(1, names["task"].num_outputs, 4, 4, 4)
    assert names["loss"](logits, torch.ones(1, 1, 4, 4, 4, dtype=torch.uint8)) > 0


def label_maps_are_written(names: dict[str, Any]) -> None:
    """A page about predictions leaves one for each image."""
    assert all(path.exists() for path in names["label_maps"].values())
    assert len([*names["folder"].glob("*.nii.gz")]) == len(names["cases"])


def server_answers(names: dict[str, Any]) -> None:
    """The server of a page answers with the label map and its volumes, or with the fault of a file."""
    file = next(Path("imagesTs").glob("*.nii.gz"))
    with ThreadingHTTPServer(("127.0.0.1", 0), names["Segment"]) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with urllib.request.urlopen(address, data=file.read_bytes()) as answer:
                content, volumes = answer.read(), json.loads(answer.headers["Volumes"])
            small = nibabel.Nifti1Image(np.ones((4, 4, 4), np.uint8), np.eye(4)).to_bytes()
            for sent, status, said in ((b"none", 400, "gz"), (gzip.compress(small), 422, "is constant")):
                with pytest.raises(urllib.error.HTTPError, match=str(status)) as refused:
                    urllib.request.urlopen(address, data=sent)
                assert said in refused.value.read().decode()
                refused.value.close()
        finally:
            server.shutdown()
    found = names["model"](file)
    labels = nibabel.Nifti1Image.from_bytes(gzip.decompress(content))
    assert np.array_equal(np.asarray(labels.dataobj), found.labels[0].numpy())
    assert volumes == found.volumes


# What must come of a page, beside that it runs.
COMES_OF: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/in-memory.md": server_answers,
    "docs/labels.md": loss_takes_regions,
    "docs/planning.md": planned_patch_is_written,
    "docs/prediction.md": label_maps_are_written,
}


def link_all(source: Path, target: Path) -> None:
    """Give a page its own folders with links to the shared files, so that it writes to its own."""
    for folder, folders, files in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(exist_ok=True)
        for name in [*files, *(name for name in folders if (Path(folder) / name).is_symlink())]:
            (place / name).symlink_to((Path(folder) / name).resolve())


def runnable(page: Path, *languages: str) -> list[Block]:
    """Return the page's blocks of these languages without a reason not to run them."""
    return [block for language in languages for block in read_blocks(page, language) if not block.reason]


WITH_PYTHON = [page for page in PAGES if runnable(page, "python") and name_page(page) not in OF_THEIR_OWN]


@pytest.mark.usefixtures("one_device_seen", "ready_python")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_page)
def test_python_of_a_page_runs(page, made, tmp_path, monkeypatch):
    link_all(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "nn": nn, **GIVEN.get(name_page(page), dict)()}
    for block in runnable(page, "python"):
        exec(compile("\n" * block.line + block.text, name_page(page), "exec"), names)
    COMES_OF.get(name_page(page), lambda names: None)(names)


@pytest.fixture
def one_device_seen(monkeypatch):
    """Run pages as on a machine without a GPU; their examples are small."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def alternatives(text: str) -> list[str]:
    """Return the alternatives in a block that sets a key more than once, or the whole block."""
    keys = Counter(line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha())
    return text.splitlines() if max(keys.values(), default=1) > 1 else [text]


YAML = [block for page in PAGES if name_page(page) not in OF_THEIR_OWN for block in runnable(page, "yaml")]


@pytest.mark.parametrize("block", [block for block in YAML if not block.title], ids=str)
def test_yaml_is_of_a_config(block, tmp_path):
    """A fragment is put over a config that is whole without it."""
    for part in alternatives(block.text):
        base = yaml.safe_load((ROOT / "configs" / "task04_unet.yaml").read_text(encoding="utf-8"))
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({**base, **yaml.safe_load(part)}), encoding="utf-8")
        check_components(load_config(config))


SPLITS = re.findall(r"^\| `(\{.*?\})` \|", (ROOT / "docs/training.md").read_text(encoding="utf-8"), flags=re.M)


def test_every_kind_of_split_of_a_table_is_of_a_config(tmp_path):
    assert len(SPLITS) == 5
    for split in SPLITS:
        test_yaml_is_of_a_config(Block(ROOT / "docs/training.md", 1, "yaml", "", f"split: {split}\n", ""), tmp_path)
    with pytest.raises(ValueError, match="did you mean 'epochs'"):  # what no config has is found
        test_yaml_is_of_a_config(Block(ROOT / "page.md", 1, "yaml", "", "training: {epoch: 3}\n", ""), tmp_path)


READERS = {"json": json.loads, "toml": tomllib.loads}


@pytest.mark.parametrize("block", [block for page in PAGES for block in runnable(page, *READERS)], ids=str)
def test_json_and_toml_can_be_read(block):
    assert READERS[block.language](block.text)


def test_no_block_is_overlooked_and_no_more_are_left_out():
    """Each fence begins or ends one of the blocks that are read, in a language that is known."""
    blocks = [block for page in PAGES for block in read_blocks(page)]
    assert [str(block) for block in blocks if block.language not in LANGUAGES] == []
    assert Counter(name_page(block.page) for block in blocks if block.reason) == NOT_RUN
    for page in PAGES:
        fences = sum(line.lstrip().startswith("```") for line in page.read_text(encoding="utf-8").splitlines())
        assert fences == 2 * len(read_blocks(page)), page
