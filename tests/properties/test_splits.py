from hypothesis import given
from hypothesis import strategies as st

from volseg.data.splits import folds


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
