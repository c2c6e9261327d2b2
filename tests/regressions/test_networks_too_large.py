"""A wrong number in a config or in nnU-Net's plans took a machine's memory, or minutes, before an untyped RuntimeError.

Networks of 10^9 features or blocks, and huge patches, are refused before they take memory.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import volseg
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment import REGISTRIES
from volseg.experiment.placement.placed_network import build_model
from volseg.experiment.prediction.sources import load_trained
from volseg.models import build_network

STORED = Path(__file__).parents[1] / "exchange" / "nnunet" / "model"

PLAIN = {"name": "PlainConvUNet", "strides": [1, 2], "kernel_size": [3, 3], "filters": [4, 8], "decoder_blocks": 2}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "UNet", "channels": [10**9, 16], "strides": [2]}, "whole numbers up to 65536, got 1000000000"),
        (
            {"name": "UNet", "channels": [60_000, 60_000], "strides": [2]},
            "parameters do not fit into half of the free memory",
        ),
        ({"name": "UNet", "channels": [4, 8], "strides": [2], "kernel_size": 60_001}, "do not fit into half"),
        ({**PLAIN, "blocks": [10**9, 1]}, "whole numbers up to 65536"),
        ({"name": "SwinUNETR", "depths": [10**9, 2, 2, 2]}, "whole numbers up to 65536"),
        ({"name": "UNet", "channels": [-5, 1], "strides": [2]}, "network UNet refused .*negative dimension"),
        ({"name": "UNETR", "img_size": [60_000] * 3}, "do not fit into half"),
        ({"name": "SwinUNETR", "feature_size": 48_000}, "do not fit into half"),
        ({"name": "UNet", "channels": [1, 1], "strides": [1], "num_res_units": 60_000}, "more than 5000 parameters"),
    ],
)
def test_a_network_that_does_not_fit_into_memory_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_network(spec, in_channels=1, out_channels=2)


class Chain(torch.nn.Sequential):
    """A network of the user's own: it makes 6,004 parameters and drops 3,000 other tensors."""

    def __init__(self, in_channels, out_channels):
        layers = [torch.nn.Conv3d(2, 2, 1) for _ in range(3000) if torch.zeros(3) is not None]
        super().__init__(torch.nn.Conv3d(in_channels, 2, 1), *layers, torch.nn.Conv3d(2, out_channels, 1))


def test_a_network_of_the_users_own_is_not_bounded():
    """The bound for built-in networks refused it, since it also counts tensors that are dropped."""
    volseg.register("network", "Chain", Chain)
    try:
        assert len(build_network({"name": "Chain"}, in_channels=1, out_channels=2).state_dict()) == 6004
    finally:
        REGISTRIES["network"].forget("Chain")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("features_per_stage", [10**9] * 3, "whole numbers up to 65536"),
        ("features_per_stage", [4, 6, 60_000], "do not fit into half|of shape"),
        ("features_per_stage", [4, 6.0, 8], "with filters"),
        ("features_per_stage", [4, True, 8], "with filters"),
        ("n_conv_per_stage", [10**9, 2, 2], "whole numbers up to 65536"),
        ("n_conv_per_stage", [2, 2], r"needed: 3 positive whole numbers"),
        ("n_conv_per_stage_decoder", [2, 2, 2], "needed: 2 positive whole numbers"),
        ("n_stages", 1000, "of 1000 stages; needed: 2 to 32"),
        ("n_stages", 10**9, "of 1000000000 stages"),
        ("n_stages", True, "of True stages"),
        ("kernel_sizes", [[10**9] * 3] * 3, "whole numbers up to 65536"),
        ("strides", [[1, 1, 1], [1, 2, 2], [16, 2, 2]], r"\[8, 24, 24\] is no multiple of .*\[16, 4, 4\]"),
        ("patch_size", [10**9] * 3, "patch.size .* GiB .*; take a smaller one"),
        ("patch_size", [2**40] * 3, "patch.size"),
        ("patch_size", [8, 24, 24.5], "patch_size should be three whole numbers"),
        *(
            ("patch_size", [8, 24, side], "patch_size should be three positive numbers")
            for side in (float("nan"), "24")
        ),
        ("patch_size", [8, 24, True], "patch_size should be three positive numbers|no multiple"),
        ("patch_size", [8, 25, 24], "no multiple"),
        ("spacing", [1, 1, float("inf")], "spacing should be three positive numbers"),
        ("spacing", [1, 1, 10**30 * 10**10], "more than 64 bits|spacing"),
        ("use_mask_for_norm", [1, 0], "a scheme and a mask"),
        ("inherits_from", "3d_fullres", "has no configuration"),
    ],
)
def test_plans_with_wrong_sizes_are_refused(place, value, message, tmp_path):
    model = shutil.copytree(STORED, tmp_path / "model")
    plans = json.loads((model / "plans.json").read_text(encoding="utf-8"))
    base = plans["configurations"]["base"]
    of = base["architecture"]["arch_kwargs"] if place in base["architecture"]["arch_kwargs"] else base
    of[place] = value
    (model / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    with pytest.raises((ConfigError, CheckpointError, DataError), match=f"(?s){message}"):
        load_trained(model)


def test_a_patch_that_does_not_fit_into_memory_is_refused():
    trained = load_trained(STORED)
    patch = trained.config.patch.model_copy(update={"size": (10**6,) * 3})
    config = trained.config.model_copy(update={"patch": patch})
    with pytest.raises(ConfigError, match=r"patch.size .* and this machine has"):
        build_model(config, trained.task, torch.device("cpu"))
