"""The cardiac benchmark: a fold's patients are for tests, and the others have masks or scribbles."""

import acdc
import h5py
import nibabel
import numpy as np
import pytest

from volseg.data.layouts import load_task


def test_volumes_become_a_data_set_with_masks_or_scribbles(tmp_path):
    folder, rng, written = tmp_path / acdc.VOLUMES, np.random.default_rng(0), {}
    folder.mkdir()
    for name in ("patient019_frame01", "patient020_frame12", "patient021_frame01"):
        written[name] = {"image": rng.random((3, 5, 4), np.float32)}
        written[name] |= {field: rng.integers(0, top, (3, 5, 4)) for field, top in (("label", 4), ("scribble", 5))}
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for field, values in written[name].items():
                file[field] = values
    for kind, options, ignore in (("label", [], None), ("scribble", ["--scribbles"], acdc.UNKNOWN)):
        out = tmp_path / kind
        acdc.main([str(tmp_path), str(out), "--fold", "1", *options])
        task = load_task(out)
        assert [case["case"] for case in task.training] == ["patient021_frame01"]
        assert task.ignore == ignore
        for place, name, field in (
            ("imagesTr", "patient021_frame01", "image"),
            ("labelsTr", "patient021_frame01", kind),
            ("labelsTs", "patient020_frame12", "label"),
        ):
            volume = nibabel.load(out / place / f"{name}.nii.gz")
            assert np.array_equal(np.asarray(volume.dataobj), written[name][field].transpose(2, 1, 0))
            assert volume.header.get_zooms() == pytest.approx(acdc.SPACING)
            assert nibabel.aff2axcodes(volume.affine) == ("L", "P", "S")
    with pytest.raises(FileNotFoundError, match="in and outside of fold 3"):
        acdc.main([str(tmp_path), str(tmp_path / "none"), "--fold", "3"])
    assert not (tmp_path / "none").exists()
