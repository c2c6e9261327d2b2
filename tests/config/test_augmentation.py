"""What an augmentation section refuses."""

import pytest

from volseg.config.augmentation import AugmentationConfig
from volseg.config.base import validated
from volseg.errors import ConfigError


def test_sections_survive_a_round_trip():
    config = AugmentationConfig.model_validate({"noise": {"probability": 0}, "mirror": {"axes": [1, 0, 1]}})
    assert AugmentationConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rotate": {}}, "rotate: unknown key; did you mean 'rotation'?"),
        ({"rotation": {"probabilty": 1}}, "rotation.probabilty: unknown key; did you mean 'probability'?"),
        ({"noise": {"probability": 1.5}}, "noise.probability: .*less than or equal to 1, got 1.5"),
        ({"scaling": {"factor": [1.4, 0.7]}}, r"factor must be \(lowest, highest\), got \(1.4, 0.7\)"),
        (
            {"elastic": {"spacing_voxels": 5, "displacement_voxels": [0, 4]}},
            "displacement_voxels of up to 4 folds the anatomy where control points are 5 voxels apart",
        ),
    ],
)
def test_faults_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        validated(AugmentationConfig, values, "augmentation")
