"""Label maps hold the files' values: of the most probable class, or of regions painted one over the other."""

import nibabel
import numpy as np
import pytest
import torch
from label_maps import original_label_map
from monai.data import MetaTensor

from volseg.errors import GridError
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction


def make_image(size=(4, 5, 6)):
    return MetaTensor(
        torch.randn(1, *size),
        affine=torch.eye(4, dtype=torch.float64),
        meta={"original_affine": torch.eye(4, dtype=torch.float64), "spatial_shape": size},
    )


def by_hand(probabilities, values):
    """nnU-Net 2.8.1's ``convert_probabilities_to_segmentation`` with regions."""
    painted = np.zeros(probabilities.shape[1:], dtype=np.uint16)
    for index, value in enumerate(values):
        painted[probabilities[index].numpy() > 0.5] = value
    return painted


@pytest.mark.parametrize("values", [(2, 1, 4), (1, 300, 14175), (1, 1, 2)])
def test_regions_are_painted_in_their_order(values):
    probabilities, image = torch.rand(3, 4, 5, 6), make_image()
    painted = original_label_map(probabilities, image, values=values, regions=True)
    assert painted.dtype == (torch.uint8 if max(values) < 256 else torch.int32)
    assert np.array_equal(painted[0].numpy(), by_hand(probabilities, values))


@pytest.mark.parametrize("window", [None, (4, 4, 4)])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_network_of_regions_is_asked_for_sigmoids(window, mirror):
    """One without neighbourhood: windows and mirrorings change nothing. Regions may be sure at once."""
    image = make_image()
    scale = torch.tensor([4.0, -3.0, 1.0]).view(1, 3, 1, 1, 1)
    predictor = Predictor(
        model=lambda x: scale * x, num_classes=3, values=(1, 2, 4), regions=True, window=window, mirror=mirror
    )
    expected = (scale * image.as_tensor()).sigmoid()[0]
    torch.testing.assert_close(predictor.probabilities(image.as_tensor()[None])[0], expected)
    assert np.array_equal(predictor({"case": "a", "image": image})[0].numpy(), by_hand(expected, (1, 2, 4)))


def test_classes_become_their_values():
    image = make_image()
    model = torch.nn.Conv3d(1, 3, 1)
    plain, gaps = Predictor(model=model, num_classes=3), Predictor(model=model, num_classes=3, values=(0, 7, 500))
    case = {"case": "a", "image": image}
    assert torch.equal(torch.tensor([0, 7, 500], dtype=torch.int32)[plain(case).long()], gaps(case).as_tensor())


def test_a_network_of_another_number_of_regions_is_refused():
    predictor = Predictor(model=lambda x: x, num_classes=2, values=(1, 2), regions=True)
    with pytest.raises(GridError, match="one channel per region, got"):
        predictor({"case": "a", "image": make_image()})


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.int32)]
)
def test_the_largest_value_chooses_the_type_of_the_file(largest, dtype, tmp_path):
    image = make_image()
    label_map = torch.zeros(1, 4, 5, 6, dtype=torch.int32)
    label_map[0, 1, 2, 3] = largest
    written = nibabel.load(write_prediction(label_map, image, tmp_path / "a.nii.gz"))
    assert written.get_data_dtype() == dtype
    assert np.array_equal(np.asarray(written.dataobj), label_map[0].numpy())
