"""Which files are one image: by numbers as nnU-Net has them, by names, or each by itself."""

import pytest

from volseg.data.layouts.naming import group_channels
from volseg.errors import DataError


def grouped(tmp_path, names, modalities):
    """Return the names of the files of each case."""
    images = [tmp_path / name for name in names]
    cases = group_channels(images, modalities)
    return {
        case["case"]: [path.name for path in case["image"]] if isinstance(case["image"], tuple) else case["image"].name
        for case in cases
    }


def test_numbers_and_names_of_channels(tmp_path):
    names = [
        "a_0001.nii",
        "a_0000.nii.gz",
        "b_T1.nii",
        "b_flair.mha",
        "c.nii",
        "d_0007.nii",
        "patient/t1",
        "patient/FLAIR",
    ]
    assert grouped(tmp_path, names, ("T1", "FLAIR")) == {
        "a": ["a_0000.nii.gz", "a_0001.nii"],
        "b": ["b_T1.nii", "b_flair.mha"],
        "c": "c.nii",  # holds all channels, or the check will say so
        "d_0007": "d_0007.nii",  # cases may be numbered: there is no d_0000
        "patient": ["t1", "FLAIR"],
    }


def test_of_two_names_the_longer_counts(tmp_path):
    names = ["a_pre_t1.nii", "a_t1.nii"]
    assert grouped(tmp_path, names, ("t1", "pre_t1")) == {"a": ["a_t1.nii", "a_pre_t1.nii"]}


def test_one_channel(tmp_path):
    assert grouped(tmp_path, ["a_0000.nii", "b_0000.nii"], ("CT",)) == {"a": "a_0000.nii", "b": "b_0000.nii"}
    assert list(grouped(tmp_path, ["a_0000.nii", "a_0001.nii"], ("CT",))) == ["a_0000", "a_0001"]
    assert list(grouped(tmp_path, ["a_0000.nii", "b.nii"], ("CT",))) == ["a_0000", "b"]


def test_the_name_of_the_only_channel_is_no_part_of_a_cases_name(tmp_path):
    names = ["pat13_t1.nii.gz", "pat14-T1.mha", "pat15.nii", "t1.nii", "pat13_t2.nii.gz"]
    assert list(grouped(tmp_path, names, ("t1",))) == ["pat13", "pat14", "pat15", "t1", "pat13_t2"]
    both = ["pat13_t1.nii", "pat13.nii", "pat14_t1.nii"]
    assert list(grouped(tmp_path, both, ("T1",))) == ["pat13_t1", "pat13", "pat14"], "two cases are not called alike"
    assert grouped(tmp_path, [], ("T1",)) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a_0000.nii", "a_0001.nii"],
            r"a has 2 file\(s\), a_0000\.nii, a_0001\.nii; needed: one for each of the 3 channels, called a_0000, "
            r"a_0001 \.\.\. or by T1, T2, ADC, or one file of all channels, or a table \(CSV\)",
        ),
        (["a_0000.nii", "a_0001.nii", "a_0003.nii"], r"a has 3 file\(s\), a_0000\.nii, a_0001\.nii, a_0003\.nii"),
        ([f"a_000{n}.nii" for n in range(4)], r"a has 4 file\(s\)"),
        (["a_T1.nii", "a_ADC.nii"], r"a has 2 file\(s\), a_T1\.nii, a_ADC\.nii"),
        (["a.nii", "a_T1.nii"], r"a has 2 file\(s\), a\.nii, a_T1\.nii"),
        (["a_T1.nii", "a_0000.nii"], r"a_T1\.nii and .*a_0000\.nii are both channel 0 of a; name one of them"),
        (["a.nii", "a.mha"], r"a\.nii and .*a\.mha are both all channels of a; name one of them"),
    ],
)
def test_channels_that_are_not_all_there(tmp_path, names, message):
    with pytest.raises(DataError, match=message):
        grouped(tmp_path, names, ("T1", "T2", "ADC"))
