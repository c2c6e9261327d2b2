"""Kernels compiled beforehand without a GPU, in separate processes, by the real compiler."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels import INTERPRETED, run_with_compiler
from volseg.device.compiling import Compiling, Specialization, can_compile
from volseg.device.triton_kernels import INSTALLED, KernelCall
from volseg.errors import ParallelError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    str(path) for path in (ROOT / "configs").rglob("*.yaml") if path.stem not in ("quickstart", "task04_cpu")
)
SMALL = ["--set", "network.filters=[16, 32, 32]", "--set", "patch.size=[8, 16, 16]", "--set", "patch.batch=1"]

with_compiler = pytest.mark.skipif(not INTERPRETED, reason="takes a minute: make test-kernels runs it")


def compile_and_launch(cache: Path, *arguments: str) -> dict[str, object]:
    """Run `compile_and_launch.py`."""
    told = run_with_compiler(cache, "-m", "tests.device.compile_and_launch", *arguments)
    found: dict[str, object] = json.loads(told.splitlines()[-1])
    return found


UNET = [str(ROOT / "configs/task04_unet.yaml"), *SMALL, "--capability", "9", "0"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile a small U-Net's kernels; return the results."""
    return compile_and_launch(tmp_path_factory.mktemp("compiled"), *UNET)


@pytest.mark.kernels
@with_compiler
def test_what_was_compiled_beforehand_is_what_a_launch_finds(compiled):
    found = compiled
    assert found["problems"] == []
    assert found["compiled_anew"] == []
    assert found["kernels"] > 15
    assert {"_moments_kernel", "_input_kernel", "_combine_kernel", "_forward_kernel"} <= {*found["counts"]}


@pytest.mark.kernels
@with_compiler
def test_a_patch_of_another_size_takes_the_same_kernels(compiled, tmp_path):
    """Sides in bounds and quotients change no instruction, but took 4 of 14 s of compiling."""
    growth = ["--set", "patch.growth=[{until: 0.5, size: [8, 8, 16]}]"]
    counts = [compiled["counts"], compile_and_launch(tmp_path, *UNET, *growth, "--count")["counts"]]
    assert counts[1] == counts[0]


@pytest.mark.slow
@pytest.mark.kernels
@with_compiler
@pytest.mark.parametrize("capability", [("8", "0"), ("9", "0")], ids="sm_{0[0]}{0[1]}".format)
def test_the_kernels_of_all_configs_compile(tmp_path, capability):
    found = compile_and_launch(tmp_path, *CONFIGS, "--capability", *capability)
    assert found["problems"] == []
    assert found["compiled_anew"] == []


@pytest.mark.skipif(INSTALLED and not INTERPRETED, reason="Triton compiles here")
def test_without_a_compiler_nobody_can_compile():
    assert not can_compile()
    with pytest.raises(ParallelError, match="compiling kernels needs Triton, which is not installed"):
        Compiling((9, 0), 1)


def parameter(name, **told):
    return SimpleNamespace(name=name, **{"is_constexpr": False, "do_not_specialize": False, **told})


class Jitted:
    params = (
        *map(parameter, ("x", "V", "eps")),
        parameter("BV", is_constexpr=True),
        parameter("H", do_not_specialize=True),
    )


class OfKernel:
    home = ("module", "_kernel")
    compiled = Jitted()


def key_of(tensor, number, eps=1e-5, block=64, warps=4, height=3):
    call = KernelCall(OfKernel(), (tensor, number), {"eps": eps, "BV": block, "H": height, "num_warps": warps})
    return Specialization.of(call).key


def test_calls_that_run_one_binary_are_one_specialization():
    half, whole = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    assert key_of(half, 32) == key_of(half[8:], 4096, eps=0.1) == key_of(half, -16)
    assert key_of(half, 7) == key_of(half[16:], 33)
    assert key_of(half, 7) == key_of(half, 7, height=16) == key_of(half, 7, height=1) == key_of(half, 7, eps=1.0)
    different = [
        *(key_of(half, number) for number in (32, 1, 7, 2**40, 2**40 + 1, None)),
        key_of(whole, 32),
        key_of(half[1:], 32),  # 2 bytes behind a multiple of 16
        key_of(half, 32, block=128),
        key_of(half, 32, warps=8),
        key_of(half, 32, height=2**40),
    ]
    assert len(set(different)) == len(different)
