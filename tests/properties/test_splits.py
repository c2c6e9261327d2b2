from collections import Counter
from itertools import product

from hypothesis import assume, example, given
from hypothesis import strategies as st

from volseg.data.cases import Split, folds
from volseg.data.groups import list_split_patients


@given(data=st.data(), ids=st.lists(st.text(min_size=1, max_size=4), unique=True, min_size=2, max_size=40))
def test_folds_partition_the_cases(data, ids):
    num_folds = data.draw(st.integers(2, len(ids)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    splits = folds(ids, num_folds, seed)
    assert len(splits) == num_folds
    assert sorted(name for split in splits for name in split.validation) == sorted(ids)
    for split in splits:
        assert sorted(split.training + split.validation) == sorted(ids)
        assert list(split.training) == sorted(split.training)
        assert list(split.validation) == sorted(split.validation)
    sizes = [len(split.validation) for split in splits]
    assert max(sizes) - min(sizes) <= 1


@given(ids=st.lists(st.text(max_size=4), unique=True, min_size=5, max_size=20), data=st.data())
def test_the_order_of_the_cases_does_not_matter(ids, data):
    assert folds(ids) == folds(data.draw(st.permutations(ids)))


@st.composite
def grouped(draw):
    """Return the patient of each case, and a number of folds that there are patients for."""
    names = draw(st.lists(st.text("ab_-0123456789é", min_size=1, max_size=6), unique=True, min_size=2, max_size=40))
    patients = draw(st.lists(st.integers(0, 12), min_size=len(names), max_size=len(names)))
    assume(len(set(patients)) > 1)
    groups = {name: f"p{patient}" for name, patient in zip(names, patients, strict=True)}
    return groups, draw(st.integers(2, len(set(patients))))


@given(drawn=grouped(), seed=st.integers(0, 2**32 - 1))
def test_a_patient_is_never_cut_and_each_case_validates_once(drawn, seed):
    groups, num_folds = drawn
    splits = folds(groups, num_folds, seed, groups=groups)
    assert len(splits) == num_folds
    assert sorted(name for split in splits for name in split.validation) == sorted(groups)
    for split in splits:
        assert split.validation
        assert sorted(split.training + split.validation) == sorted(groups)
        assert not {groups[name] for name in split.training} & {groups[name] for name in split.validation}
    assert list_split_patients(splits, groups) == []
    sizes = [len(split.validation) for split in splits]
    largest = max(Counter(groups.values()).values())
    assert max(sizes) - min(sizes) <= largest


@given(drawn=grouped(), data=st.data())
def test_folds_by_patient_depend_on_neither_order_nor_the_names_of_patients(drawn, data):
    groups, num_folds = drawn
    order = data.draw(st.permutations(sorted(groups)))
    patients = sorted(set(groups.values()))
    renamed = dict(zip(patients, data.draw(st.permutations(patients)), strict=True))
    others = {name: renamed[groups[name]] for name in order}
    assert folds(order, num_folds, groups=others) == folds(groups, num_folds, groups=groups)


@given(ids=st.lists(st.text(max_size=4), unique=True, min_size=5, max_size=20))
def test_patients_of_one_case_each_have_nnunets_folds(ids):
    assert folds(ids, groups={name: f"p{name}" for name in ids}) == folds(ids)


@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=7), num_folds=st.integers(2, 3))
@example(sizes=[2, 2, 2, 3, 3], num_folds=2)  # the bound is reached
def test_folds_by_patient_are_nearly_as_even_as_can_be(sizes, num_folds):
    """Against every way to deal the patients: the largest fold has at most 4/3 of the cases that it must (Graham)."""
    assume(len(sizes) >= num_folds)
    groups = {f"{patient}_{case}": f"{patient}" for patient, size in enumerate(sizes) for case in range(size)}
    best = min(
        max(sum(size for size, at in zip(sizes, deal, strict=True) if at == fold) for fold in range(num_folds))
        for deal in product(range(num_folds), repeat=len(sizes))
    )
    dealt = max(len(split.validation) for split in folds(groups, num_folds, groups=groups))
    if len(set(groups.values())) < len(groups):
        assert best <= dealt
        assert 3 * num_folds * dealt <= (4 * num_folds - 1) * best  # 4/3 - 1/(3 m), without rounding


@given(drawn=grouped(), data=st.data())
def test_a_cut_patient_is_found(drawn, data):
    groups, num_folds = drawn
    assume(max(Counter(groups.values()).values()) > 1)
    split = data.draw(st.sampled_from(folds(groups, num_folds, groups=groups)))
    several = [name for name in split.training if list(groups.values()).count(groups[name]) > 1]
    assume(several and len(split.training) > 1)
    moved = data.draw(st.sampled_from(several))
    cut = Split(training=tuple(name for name in split.training if name != moved), validation=(*split.validation, moved))
    assert [found.patient for found in list_split_patients([split, cut], groups)] == [groups[moved]]
