"""A GPU's autocast on devices that stand for GPUs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.following import follow
from volseg.device.torch_internals import list_autocast_operators
from volseg.errors import FollowError
from volseg.estimate.fake_step.gpu_autocast import BANNED, FLOAT32, FLOAT32_RESULT, HALF, WIDEST
from volseg.estimate.fake_step.tracing import TracedStep
from volseg.estimate.gpu_kinds import find_kind

GPU = find_kind("h200")

REFUSED = {"_cudnn_rnn", "linalg_matrix_sqrth", "norm.Scalar", "norm.ScalarOpt_dim"}
"""Of builds with cuDNN; of torch 2.14 and later; and norms that no function of Python calls."""


def test_the_lists_are_torchs() -> None:
    lists = (HALF, FLOAT32, FLOAT32_RESULT, WIDEST, frozenset(BANNED))
    others = list_autocast_operators("AutocastCUDA").difference(*lists, REFUSED)
    of_named_tensors = ("imname", "DimnameList", ".names_ScalarOpt_dim")  # which torch 2.13 has no more
    assert {name for name in others if not name.endswith(of_named_tensors)} == set()
    assert sum(map(len, lists)) == len(frozenset().union(*lists))


def test_what_is_cast_and_in_no_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volseg.estimate.fake_step.gpu_autocast.WIDEST", WIDEST - {"cross"})

    def step(followed: TracedStep) -> None:
        full, host = followed.empty(1, 2, 8, 3), torch.ones(2, 3)
        torch.linalg.cross(full, full)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.cross(host, host, dim=1).dtype == torch.float32
            torch.cross(full, full, dim=3)

    with pytest.raises(FollowError, match="casts aten::cross under autocast"):
        follow(step, gpu=GPU)


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda half, full: F.linear(full[0, 0, 0], full[0, 0, 0]), torch.bfloat16),
    "conv3d": (lambda half, full: F.conv3d(full, full[:, :, :1, :1, :1]), torch.bfloat16),
    "matmul": (lambda half, full: full @ full, torch.bfloat16),
    "attention": (lambda half, full: F.scaled_dot_product_attention(full[0], full[0], full[0]), torch.bfloat16),
    "layer_norm": (lambda half, full: F.layer_norm(half, (8,)), torch.float32),
    "group_norm": (lambda half, full: F.group_norm(half, 1), torch.float32),
    "instance_norm": (lambda half, full: F.instance_norm(half), torch.bfloat16),
    "exp": (lambda half, full: half.exp(), torch.float32),
    "softmax": (lambda half, full: F.softmax(half, 1), torch.float32),
    "log_softmax": (lambda half, full: F.log_softmax(half, 1), torch.float32),
    "sum": (lambda half, full: half.sum((2, 3)), torch.float32),
    "norm": (lambda half, full: torch.norm(half, dim=1), torch.float32),
    "mse_loss": (lambda half, full: F.mse_loss(half, half), torch.float32),
    "mean": (lambda half, full: half.mean(), torch.bfloat16),
    "max_pool3d": (lambda half, full: F.max_pool3d(half, 2), torch.bfloat16),
    "avg_pool3d": (lambda half, full: F.avg_pool3d(half, 2), torch.bfloat16),
    "pad": (lambda half, full: F.pad(half, (1,) * 6, mode="replicate"), torch.bfloat16),
    "cat": (lambda half, full: torch.cat([half, half]), torch.bfloat16),
    "addcmul": (lambda half, full: torch.addcmul(half, full, half), torch.float32),
}


@pytest.fixture(scope="module")
def found() -> dict[str, torch.dtype]:
    """The dtype of each call's result."""
    dtypes = {}

    def step(followed: TracedStep) -> None:
        full = followed.empty(1, 2, 8, 8, 8)
        half = full.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes.update({name: call(half, full).dtype for name, (call, _) in CALLS.items()})

    follow(step, gpu=GPU)
    return dtypes


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_type_that_they_have_on_a_gpu(name: str, found: dict[str, torch.dtype]) -> None:
    assert found[name] == CALLS[name][1]


def test_the_cpus_autocast_is_its_own_again() -> None:
    follow(lambda followed: None, gpu=GPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(1, 1, 4, 4, 4, dtype=torch.bfloat16)
        assert (F.max_pool3d(x, 2).dtype, x.exp().dtype) == (torch.float32, torch.bfloat16)
