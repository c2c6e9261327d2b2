import os

import pytest

from volseg.files import replacing


def test_a_block_that_ends_well_replaces_the_file(tmp_path):
    path = tmp_path / "new" / "state.bin"
    for content in (b"first", b"second"):
        with replacing(path) as partial:
            partial.write_bytes(content)
            assert not path.exists() or path.read_bytes() == b"first"
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_file_and_nothing_else(tmp_path, fault):
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")

    def interrupted():
        with replacing(path) as partial:
            partial.write_bytes(b"hal")
            raise fault

    with pytest.raises(fault):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.bin"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "state.bin"):
        pass
    assert not os.listdir(tmp_path)
