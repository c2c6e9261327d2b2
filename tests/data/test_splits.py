"""Folds equal nnU-Net's, and case names show which cases belong to one patient."""

import json
import re
import uuid
from pathlib import Path
from random import Random

import pytest

from volseg.data.cases import folds, read_splits, write_splits
from volseg.data.groups import propose_group
from volseg.errors import DataError

PUBLISHED = json.loads((Path(__file__).parent / "msd_task04_folds.json").read_text(encoding="utf-8"))


def test_folds_are_the_published_ones_of_task04():
    """The lists that MONAI's DynUNet pipeline ships, which are nnU-Net's."""
    ids = PUBLISHED["validation_fold0"] + PUBLISHED["train_fold0"]
    assert len(ids) == 260
    first, second, *_ = folds(ids)
    assert list(first.validation) == PUBLISHED["validation_fold0"]
    assert list(first.training) == PUBLISHED["train_fold0"]
    assert list(second.validation) == PUBLISHED["validation_fold1"]
    assert sorted(name for split in folds(ids) for name in split.validation) == sorted(ids)


def test_the_first_folds_take_what_does_not_divide():
    assert [len(split.validation) for split in folds(map(str, range(13)))] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("ids", "num_folds", "message"),
    [
        ("abc", 5, r"got 5 folds of 3 cases; set split\.num_folds to 3"),
        ("a", 5, r"got 5 folds of 1 cases; set split\.validation to none"),
        ("abc", 1, r"needed: at least 2 folds.*set split\.num_folds to 2"),
        ("abb", 2, "case ids must be unique, but 'b' occur twice"),
    ],
)
def test_folds_that_cannot_be(ids, num_folds, message):
    with pytest.raises(DataError, match=message):
        folds(ids, num_folds)


def test_written_splits_are_nnunets_and_read_back(tmp_path):
    splits = folds("abcdefg")
    path = write_splits(tmp_path / "splits_final.json", splits)
    assert json.loads(path.read_text(encoding="utf-8"))[0] == {
        "train": list(splits[0].training),
        "val": list(splits[0].validation),
    }
    assert read_splits(path, "abcdefg") == splits
    assert read_splits(path) == splits
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "splits.json cannot be read as a split file: "),
        ("{}", r"should be a list of folds, \[\{\"train\""),
        ("[]", "should be a list of folds"),
        ('[["a"]]', r'fold 0 should be \{"train": \[...\], "val": \[...\]\}, got list'),
        ('[{"train": ["a"]}]', r"fold 0 should be .*, got keys \['train'\]"),
        ('[{"train": "a", "val": ["b"]}]', r"fold 0: 'train' should be a list of case ids \(strings\)"),
        ('[{"train": ["a"], "val": ["b"]}, {"train": ["a", "b"], "val": ["b"]}]', "fold 1: 'b' are in both"),
        ('[{"train": ["a", "a"], "val": ["b"]}]', "fold 0: 'a' occur twice among the training cases; list each once"),
        ('[{"train": [], "val": ["a"]}]', r"fold 0: a split needs cases to train on, got none \(1 for validation\)"),
        ('[{"train": ["a"], "val": ["hippocampus_1"]}]', "fold 0: 'val' has unknown cases: 'hippocampus_1'; did"),
    ],
)
def test_bad_split_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "splits.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_splits(tmp_path / "splits.json", ["a", "b", "hippocampus_001"])


def each(template, endings, count=8):
    return [name for cases in by_patient(template, endings, count) for name in cases]


def by_patient(template, endings, count=8):
    return [[template.format(number) + ending for ending in endings] for number in range(1, count + 1)]


EVIDENT = {
    "acdc": by_patient("patient{:03}", ["_frame01", "_frame12"]),
    "bids": by_patient("sub-{:02}", ["_ses-1", "_ses-2_run-1"]),
    "bids with words": [[f"sub-{name}_ses-pre", f"sub-{name}_ses-post"] for name in ("control", "ms", "sle")],
    "times": by_patient("case_{:04}", ["_t0", "_t1"]),
    "dates": by_patient("P{}", ["_2019-03-01", "_2020-11-30"]),
    "dates without dashes": by_patient("TCGA-CS-{}", ["_19960909", "_19970101"]),
    "dates behind numbers": by_patient("vol_{}", ["_20190301", "_20200506"]),
    "phases of the heart": by_patient("A{:03}", ["_ED", "_ES"]),
    "sides": by_patient("hip_{:03}", ["_L", "_R"]),
    "sides in words": by_patient("hip_{:03}", ["_left", "_right"]),
    "sides without a separator": by_patient("P{:02}", ["L", "R"]),
    "visits": by_patient("{:03}", ["-visit1", "-visit2"]),
    "follow-ups": by_patient("ID{:03}", ["_baseline", "_followup"]),
    "adni": by_patient("002_S_{:04}", ["_bl", "_m06", "_m12"]),
    "oasis": by_patient("OAS1_{:04}", ["_MR1", "_MR2"]),
    "operations": by_patient("case{:03}", [".pre-op", ".post-op"]),
    "views": by_patient("{:03}", ["_SA_ED", "_SA_ES", "_LA_ED", "_LA_ES"]),
    "sequences of several words": by_patient("{}", ["_T1DUAL", "_T2SPIR", "_t2_SPACE", "_T1DUAL_InPhase"]),
    "two separators": by_patient("CHUM-{:03}", ["__CT", "__PT"]),
    "months before sides": by_patient("90000{:02}", ["_00m_R", "_12m_R"]),
    "days": by_patient("OAS3{:04}", ["_MR_d0809", "_MR_d1204"]),
    "numbers of images": by_patient("002_S_{:04}", ["_I40966", "_I117465"]),
    "dates of TCIA": by_patient(
        "PETCT_{:010x}", ["_06-28-2001-NA-PET-CT Ganzkoerper mit KM-68499", "_01-15-2003-NA-PET-CT Thorax-41234"]
    ),
    "eyes": by_patient("P{:03}", ["_OD", "_OS"]),
    "many frames of few": by_patient("patient{:02}", [f"_frame{frame:02}" for frame in range(30)], 3),
    "many runs of few": by_patient("sub-{:02}", [f"_task-rest_run-{run:02}" for run in range(20)], 3),
    "the date first": [[f"{date}_patient{number:02}" for date in ("2019-03-01", "20201130")] for number in range(8)],
    "contrast": by_patient("{:03}", ["_arterial", "_venous"]),
    "modalities": by_patient("{:03}", ["_CT", "_MR"]),
    "called patient": by_patient("Patient_{:02}", ["_1", "_2"]),
    "called patient, with letters": by_patient("subjectAB{:02}", ["_1", "_2"]),
    "the visit first": [[f"ses-{visit}_sub-{number:02}" for visit in (1, 2)] for number in range(8)],
    "the frame first": [[f"frame{frame:02}_patient{number:03}" for frame in (1, 12)] for number in range(8)],
}


@pytest.mark.parametrize("kind", EVIDENT)
def test_evident_groups(kind):
    names = [name for cases in EVIDENT[kind] for name in cases]
    proposed = propose_group(names)
    assert proposed.evident
    assert proposed.num_patients == len(EVIDENT[kind])
    found = {}
    for name in names:
        found.setdefault(re.search(proposed.group, name)[1], []).append(name)
    assert list(found.values()) == EVIDENT[kind]


POSSIBLE = {
    "visits or patients of a site": each("MMS_{:03}", ["_01", "_02"]),
    "time points": [f"BraTS-GLI-{number:05}-{visit:03}" for number in range(20) for visit in range(1 + number % 3)],
    "letters": each("{:03}", ["a", "b"]),
    "visits behind letters": each("AB{:02}C", ["_1", "_2"]),
    "studies": [*(f"{10000 + number}_{1000000 + number}" for number in range(40)), "10007_1000041"],
}


@pytest.mark.parametrize("kind", POSSIBLE)
def test_possible_groups(kind):
    assert not propose_group(POSSIBLE[kind]).evident


random = Random(0)
NONE = {
    **{
        template: each(template, [""], 20)
        for template in (
            *("hippocampus_{:03}", "BRATS_{:03}", "case_{:04}", "la_{:03}", "liver_{}", "img{:04}", "LUNG1-{:03}"),
            *("prostate_{:02}", "amos_{:04}", "s{:04}", "FLARE22_Tr_{:04}", "R01-{:03}", "volume-{}", "Case{:02}"),
            *("patient{:03}", "sub-{:02}", "sub-verse{:03}", "BDMAP_{:08}", "pancreas_{:03}", "A0S{}V9", "{}"),
        )
    },
    "a visit each": each("sub-{:02}", ["_ses-1"]),
    "a date each": [f"P{number}_2019-03-{number:02}" for number in range(1, 20)],
    "dates": [f"2019-03-{day:02}" for day in range(1, 20)],
    "dates and numbers": [f"2019-03-{day:02}_{number:02}" for day in range(1, 9) for number in range(3)],
    "scans by date": [f"scan_2019-{month:02}-{day:02}" for month in range(1, 5) for day in range(1, 9)],
    "uuids": [str(uuid.UUID(int=random.getrandbits(128), version=4)) for _ in range(300)],
    "hashes": [f"{random.getrandbits(32):08x}" for _ in range(300)],
    "one patient": each("patient001_frame{:02}", [""]),
    "centres": [f"center{site}_scan{number:03}" for site in (1, 2) for number in range(30)],
    "sites": [f"site{site}_{number:03}" for site in range(8) for number in range(4)],
    "years": each("ISBI2013_{:02}", [""]) + each("ISBI2015_{:02}", [""]),
    "a running number": [f"S{number // 3:02}_{number:03}" for number in range(30)],
    "modality first": [f"{kind}_train_{number}" for kind in ("ct", "mr") for number in range(1001, 1021)],
    "structures": ["liver_left", "liver_right", "lung_left", "lung_right"],
    "numbers in a site called patient": [f"patient_{site}_{number:03}" for site in (1, 2, 3) for number in range(20)],
    "words in a site called subject": [f"subject{site}_case{number:03}" for site in (1, 2) for number in range(20)],
    "numbers in a group of subjects": [f"sub-{kind}_{number:02}" for kind in ("ms", "healthy") for number in range(20)],
    "numbers in a site of subjects": [f"sub-site{site}_{number:02}" for site in (1, 2) for number in range(20)],
    "numbers in a year": [f"patient_{year}_{number}" for year in range(2015, 2024) for number in range(1, 5)],
    "scans of a scanner": [f"{field}T_scan{number:02}" for field in (15, 3, 7) for number in range(8)],
    "exams of a year": [f"UKE{year}_exam{number}" for year in (2019, 2020) for number in range(9)],
    "letters and numbers of a site": [f"UKE{site}_v{number:02}" for site in (1, 2, 3) for number in range(10)],
    "one case": ["patient001_frame01"],
    "no case": [],
}


@pytest.mark.parametrize("kind", NONE)
def test_names_without_groups(kind):
    assert propose_group(NONE[kind]) is None


def test_a_case_without_a_patient_in_its_name_is_a_patient_of_its_own():
    proposed = propose_group(["patient001_frame01", "patient001_frame12", "control7", "control8"])
    found = [re.search(proposed.group, name)[1] for name in ("patient001_frame01", "control7", "control8")]
    assert found == ["patient001", "control7", "control8"]
    assert proposed.num_patients == 3


@pytest.mark.parametrize(("again", "last"), [("_t1", "!"), ("_t1_l", "!"), ("_run", "\n!"), ("_v1d1", "?")])
def test_the_search_for_many_endings_ends(again, last):
    """Each ending doubled the time of the search; 80 took forever."""
    names = [f"case{number}{again * 80}{last}" for number in range(3)]
    assert propose_group(names) is None


def test_the_reason_names_two_cases_of_one_patient():
    names = [name for cases in EVIDENT["acdc"] for name in cases]
    reason = propose_group(names).reason
    assert propose_group(names[::-1]).reason == reason
    assert "patient001_frame01 and patient001_frame12 are of the same one" in reason
    assert "16 cases are of 8 patients" in reason
