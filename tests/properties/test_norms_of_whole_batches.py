"""A batch norm of a replica uses the statistics of the whole batch, for any tensor.

A mesh of replicas is compared in float64 with one process that has the whole batch: outputs, every gradient, running
statistics, a second step, and evaluation afterwards. The norms get pooled volumes, tokens, rows, means of a volume, and
a level of one plane, which every shard computes whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import data_parallel_cases as cases
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_group import in_group
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool3d as pool


def gate_by_rows(net: "Normed", x: Tensor) -> Tensor:
    rows = x.mean((3, 4)).transpose(1, 2)
    return net.normalize(rows.reshape(-1, 4)).view(rows.shape).transpose(1, 2)[..., None, None]


PLACES: dict[str, tuple[type[nn.Module], Callable[["Normed", Tensor], Tensor]]] = {
    "volume": (nn.BatchNorm3d, lambda net, x: net.normalize(x)),
    "pool": (nn.BatchNorm3d, lambda net, x: F.interpolate(net.normalize(pool(x, 1)), x.shape[2:])),
    "two planes": (nn.BatchNorm3d, lambda net, x: F.interpolate(net.normalize(pool(x, (2, 1, 1))), x.shape[2:])),
    "one plane": (nn.BatchNorm3d, lambda net, x: net.up(net.normalize(net.down(x)).relu())),
    "summary": (nn.BatchNorm2d, lambda net, x: net.normalize(x.mean(2))[:, :, None]),
    "summary of width": (nn.BatchNorm2d, lambda net, x: net.normalize(x.mean(4))[..., None]),
    "squeeze": (nn.BatchNorm1d, lambda net, x: net.normalize(x.mean((2, 3, 4)))[:, :, None, None, None]),
    "largest": (nn.BatchNorm1d, lambda net, x: net.normalize(x.amax((2, 3, 4)))[:, :, None, None, None]),
    "rows": (nn.BatchNorm1d, gate_by_rows),
    "tokens": (nn.BatchNorm1d, lambda net, x: net.normalize(x.flatten(2)).view(x.shape)),
    "coarse tokens": (
        nn.BatchNorm1d,
        lambda net, x: net.normalize(pool(x, (2, 1, 1)).flatten(2)).mean(2)[:, :, None, None, None],
    ),
}
"""Which norm it is, and the gate that comes of it."""
CALLS = ("module", "functional", "twice", "without gradient")


@dataclass(frozen=True)
class Norm:
    """A norm's input, the way forward calls it, and its settings."""

    place: str
    call: str = "module"
    running: bool = True
    affine: bool = True
    momentum: float | None = 0.1


class Normed(nn.Module):
    """Gates a volume by a norm of the volume, or of something computed from it."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.call = norm.call
        kind, self.gate = PLACES[norm.place]
        self.norm = kind(4, eps=0.1, affine=norm.affine, momentum=norm.momentum, track_running_stats=norm.running)
        if norm.call == "functional":  # whose weights alone are used: a batch norm would be found among the modules
            self.norm = nn.GroupNorm(1, 4, affine=norm.affine)
        # Of one plane; the other places leave these two unused.
        self.down = nn.Conv3d(4, 4, (8, 2, 2), (8, 2, 2))
        self.up = nn.ConvTranspose3d(4, 4, (8, 2, 2), (8, 2, 2))

    def normalize(self, x: Tensor) -> Tensor:
        if self.call == "functional":
            return F.batch_norm(x, None, None, self.norm.weight, self.norm.bias, training=True, eps=0.1)
        if self.call == "without gradient":
            with torch.no_grad():
                gate = self.norm(x)
            return x * gate.sigmoid()
        x = self.norm(x)
        return self.norm(x.sin()) if self.call == "twice" else x

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self, x).sigmoid()


def build(norms: tuple[Norm, ...]) -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *map(Normed, norms), nn.Conv3d(4, 2, 1))


def train(norms: tuple[Norm, ...], data: int, spatial: int, kernels: str, batch: int) -> dict[str, float]:
    """Return the error of each value that differs from one process."""
    cases.CASES["norms"] = cases.Case(lambda: build(norms))
    found: dict[str, float] = cases.run("norms", data, spatial, batch=batch, kernels=kernels)
    return found


def check(norms: tuple[Norm, ...], mesh: tuple[int, int, str], batch: int) -> None:
    data, spatial, kernels = mesh
    for rank, wrong in enumerate(in_group(data * spatial, train, norms, data, spatial, kernels, batch)):
        assert not wrong, f"rank {rank} of {mesh}: largest relative errors {wrong}"


MESHES = [(2, 1, "torch"), (2, 1, "fast"), (2, 1, "slabs 2"), (2, 2, "slabs")]
ALL = tuple(Norm(place, running=n % 2 == 0) for n, place in enumerate(PLACES))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("norms", [ALL[:4], ALL[4:8], ALL[8:]], ids=lambda norms: norms[0].place)
def test_every_place(norms: tuple[Norm, ...], mesh: tuple[int, int, str]) -> None:
    check(norms, mesh, 3)


DRAWN = st.builds(
    Norm, st.sampled_from(sorted(PLACES)), st.sampled_from(CALLS), st.booleans(), st.booleans(),
    st.sampled_from([0.1, 0.7, None]),
)  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(norms=st.tuples(DRAWN) | st.tuples(DRAWN, DRAWN), mesh=st.sampled_from(MESHES), batch=st.integers(2, 5))
def test_any_norms_on_any_mesh(norms: tuple[Norm, ...], mesh: tuple[int, int, str], batch: int) -> None:
    check(norms, mesh, batch)


def refuse_pipeline(norms: tuple[Norm, ...], evaluated: bool) -> str:
    """Return the error of replicas that are pipelines: their micro-batches have no statistics of the whole batch."""
    net = build(norms).double()
    model = cases.wrap(net, 2, 1, 2, "pipeline", fixed=False)
    batch = torch.randn(2, 1, 8, 6, 6, dtype=torch.float64)
    if evaluated:  # a first pass in evaluation must not skip the check of a later one in training
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
    with pytest.raises(RuntimeError) as refusal:
        model(batch)
    return f"{type(refusal.value).__name__}: {refusal.value}"


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("call", ["module", "functional"])
def test_replicas_of_a_pipeline_refuse_batch_norm(call: str, evaluated: bool) -> None:
    for message in in_group(2, refuse_pipeline, (Norm("volume", call, running=False),), evaluated):
        assert message.startswith("ParallelError")
        assert "calls batch_norm for training, which uses the statistics of a whole batch" in message
