"""Values of files become class indices, and class indices become values again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import ROOT, read_blocks
from monai.data import MetaTensor

from volseg.data import load_task
from volseg.data.cases import Case, Task
from volseg.data.labels import num_indices, targets_of, to_classes, to_values
from volseg.errors import DataError

BRATS = {"whole": (1, 2, 4), "core": (1, 4), "enhancing": (4,)}


def task(*values: int, training: tuple[Case, ...] = (), **others: Any) -> Task:
    labels = {0: "background", **{value: f"structure {value}" for value in values}}
    return Task(
        name="T", root=Path("x"), modalities=("MRI",), labels=labels, training=training, test=(), **others
    )  # fmt: skip


@pytest.mark.parametrize("values", [(1,), (1, 2, 4), (3, 500, 14175), tuple(range(7, 7 + 253))])
def test_values_come_back(values):
    gaps = task(*values)
    files = torch.tensor([0, *values])[torch.randint(len(values) + 1, (1, 4, 5, 6))]
    classes = to_classes(files, gaps)
    assert classes.dtype == torch.uint8
    assert set(classes.unique().tolist()) <= set(range(len(values) + 1))
    assert torch.equal(to_values(classes, gaps).long(), files)


def test_values_are_as_wide_as_the_largest_needs_and_keep_their_place():
    classes = torch.tensor([[[[0, 1]]]], dtype=torch.uint8)
    assert to_values(classes, task(255)).dtype == torch.uint8
    wide = to_values(classes, task(256))
    assert (wide.dtype, wide.flatten().tolist()) == (torch.int32, [0, 256])
    volume = MetaTensor(torch.zeros(1, 2, 2, 2), affine=2 * torch.eye(4))
    assert torch.equal(to_values(to_classes(volume, task(1)), task(1)).affine, volume.affine)


@pytest.mark.parametrize("ignore", [3, 7, 255])
def test_the_ignored_value_follows_the_classes_wherever_it_lies(ignore):
    sparse = task(1, 5, ignore=ignore)
    files = torch.tensor([[[[0.0, 1.0, 5.0, ignore]]]])
    classes = to_classes(files, sparse)
    assert classes.flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(to_values(classes, sparse).float(), files)
    assert num_indices(sparse) == 4


def test_the_background_of_a_partially_labelled_case_is_a_number_of_its_own():
    cases = tuple({"case": name, "labelled": found} for name, found in (("a", (1,)), ("b", (4, 2)), ("c", (1, 2, 4))))
    partial = task(1, 2, 4, training=(*cases, {"case": "d"}))
    files = torch.tensor([[[[0, 4]]]])
    assert [to_classes(files, partial, case).flatten().tolist() for case in partial.training] == [
        [4, 3],
        [5, 3],
        [0, 3],
        [0, 3],
    ]
    assert targets_of(partial).hidden == ((0, 2, 3), (0, 1))
    assert num_indices(partial) == 6
    assert to_values(torch.tensor([5, 4, 3]), partial).tolist() == [0, 0, 4]


@pytest.mark.parametrize("strange", [3.0, 1.5, -1.0, float("nan"), 600.0])
def test_other_values_are_refused(strange):
    with pytest.raises(DataError, match=r"case a: its label has the values \[.*the values of T are \[0, 1, 2, 4\]"):
        to_classes(torch.tensor([[[[1.0, strange]]]]), task(1, 2, 4), {"case": "a"})
    with pytest.raises(DataError, match="class indices of T are 0 to 2, got 0 to 3"):
        to_values(torch.tensor([0, 3]), task(1, 2))


@pytest.mark.parametrize(
    ("values", "others", "match"),
    [
        ((1, 2), {"ignore": 2}, "the ignored value is 2"),
        ((1, 2), {"regions": {"r": (1, 3)}}, r"the region 'r' has the values \[1, 3\]"),
        ((1, 2), {"regions": {"r": (0, 1)}}, "other than the background, from"),
        ((1, 2), {"regions": {"r": ()}}, r"has the values \[\]"),
        ((1, 2), {"regions": {"r": (1, 2), "s": (2, 1)}}, "are equal"),
        (tuple(range(1, 256)), {}, "at most 254 labels, got 256"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(values, others, match):
    with pytest.raises(DataError, match=match):
        task(*values, **others)


def test_outputs_are_classes_or_regions():
    plain, regions = task(1, 2, 4), task(1, 2, 4, regions=BRATS)
    assert (plain.num_outputs, plain.output_values) == (4, (0, 1, 2, 4))
    assert plain.structures == {1: "structure 1", 2: "structure 2", 4: "structure 4"}
    assert regions.num_outputs == 3
    assert regions.structures == {(1, 2, 4): "whole", (1, 4): "core", 4: "enhancing"}
    assert targets_of(regions).regions == ((1, 2, 3), (1, 3), (3,))


@pytest.mark.parametrize(
    ("regions", "painted"),
    [
        (BRATS, (2, 1, 4)),
        ({"lesion": (2, 1)}, (2,)),
        ({"kidney": (1, 2, 4), "masses": (2, 4), "tumour": (2,)}, (1, 4, 2)),
        ({"tumour": (1, 2), "necrosis": (1,), "rim": (2,)}, (1, 1, 2)),
    ],
)
def test_a_region_is_painted_in_a_value_of_its_own(regions, painted):
    assert task(1, 2, 4, regions=regions).output_values == painted


def test_a_case_that_was_looked_through_for_nothing_known_is_refused():
    with pytest.raises(DataError, match=r"case a: 'labelled' should list .* from \[1, 2\], got \[3\]"):
        task(1, 2).labelled({"case": "a", "labelled": (3,)})
    with pytest.raises(DataError, match="unlike all training cases of T"):
        to_classes(torch.zeros(1, 1, 1, 1), task(1, 2), {"case": "a", "labelled": (2,)})


DECLARED = [block.text for block in read_blocks(ROOT / "docs" / "labels.md", "json")]


@pytest.mark.parametrize("block", DECLARED)
def test_what_the_page_declares_is_read(block, tmp_path):
    """Each manifest of the page, with its omitted parts, describes a task."""
    declared = {"modality": {"0": "CT"}, "training": [{"image": "imagesTr/a.nii", "label": "labelsTr/a.nii"}]}
    declared |= json.loads(block)
    (tmp_path / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    read = load_task(tmp_path, require_files=False)
    assert len(read.structures) == read.num_outputs - (not read.regions)
    assert targets_of(read).is_plain == ("regions" not in block and "ignore" not in block and "labelled" not in block)
