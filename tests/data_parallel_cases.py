"""Networks that replicas must train as one process trains them with the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from narrow_vnet import NarrowVNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.parallel import DataParallel, FastKernels, ModelParallel, Pipeline, RoundSums, Spatial, join_mesh
from volseg.parallel.fixed_order import fold

TOLERANCE = 1e-9
"""Of float64, relative to the largest value: sums in another order."""


class Habits(nn.Module):
    """What networks do besides: a parameter that nobody uses, one that is frozen, weights used twice, checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.unused = nn.Conv3d(1, 4, 3)
        self.frozen = nn.Conv3d(4, 4, 1)
        self.frozen.requires_grad_(False)
        self.twice = nn.Conv3d(4, 4, 3, padding=1)
        self.mix = nn.Linear(4, 4)
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.frozen(self.first(x))
        x = self.twice(F.leaky_relu(self.twice(x)))
        x = checkpoint(self.twice, x, use_reentrant=False)
        gate = self.mix(x.mean((2, 3, 4))).sigmoid()[:, :, None, None, None]
        logits = self.last(x * gate)
        return {"logits": logits, "deep": [F.avg_pool3d(logits, 2), None]}


def build_normed(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(nn.Conv3d(1, 4, 3, padding=1), norm(4), nn.LeakyReLU(0.1), nn.Conv3d(4, 6, 3, stride=2, padding=1)),
        *(norm(6), nn.PReLU(6), nn.ConvTranspose3d(6, 2, 2, stride=2)),
    )


def build_dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 6, 8])


@dataclass(frozen=True)
class Case:
    """A network, the shape of a sample, what the spatial split is told, and the precision."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (1, 8, 6, 6)
    checkpoint: str | int | None = None
    autocast: bool = False


VNET = Case(NarrowVNet, (1, 16, 16, 16))

CASES = {
    "dynunet": Case(build_dynunet, (1, 8, 8, 8)),
    "batch norm": Case(build_normed(nn.BatchNorm3d)),
    "group norm": Case(build_normed(lambda n: nn.GroupNorm(2, n))),
    "habits": Case(Habits),
    "dropout off": Case(lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Dropout3d(0.0), nn.Conv3d(4, 2, 1))),
}


def find_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a result, whole."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in find_tensors(part)]
    return [] if value is None else [value.full_tensor() if hasattr(value, "full_tensor") else value]


def compute_loss(outputs: Any) -> Tensor:
    """Return a mean over samples of something that is not linear."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return sum(compute_loss(part) for part in outputs if part is not None)  # type: ignore[return-value]
    return (outputs * outputs.sigmoid()).mean()


def wrap(
    net: nn.Module, data: int, spatial: int, replicas: int, kernels: str, fixed: bool, checkpoint: Any = None
) -> DataParallel:
    """Return the network for a mesh of processes."""
    mesh = join_mesh(data, spatial)
    cut = Spatial(fixed_order=fixed, checkpoint=checkpoint)
    model: nn.Module = net
    if kernels == "fast":
        model = FastKernels(net, "cpu")
    elif spatial > 1:
        model = ModelParallel(net, strategy=cut, mesh=mesh.spatial_group)
    elif kernels.startswith("slabs"):
        model = ModelParallel(net, strategy=cut, devices=["cpu"] * int(kernels[-1]))
    elif kernels.startswith("pipeline"):
        model = ModelParallel(
            net, strategy=Pipeline(split_size=1, record="recorded" in kernels), devices=["cpu", "cpu:1"]
        )
    return DataParallel(model, mesh.replicas(replicas, fixed_order=fixed))


def take_step(model: DataParallel, batch: Tensor) -> tuple[list[Tensor], Tensor]:
    """Compute the gradients of a batch; return this process's outputs and the loss of the whole batch."""
    dealt = model.replicas.deal(len(batch))
    own = torch.cat([batch[dealt[replica]] for replica in model.replicas.own])
    shares = model.replicas.shares(len(batch))
    sums, outputs, losses = RoundSums(model.parameters(), len(shares)), [], []
    for share in shares:
        with model.as_replica(share.replica):
            result = model(own[share.rows])
            loss = compute_loss(result) * share.weight
        loss.backward()
        sums.push()
        outputs.append(find_tensors(result))
        losses.append(loss.detach())
    sums.put_back()
    joined = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    return joined, fold([model.replicas.sum_values(loss) for loss in losses], torch.add)


def measure(actual: Tensor | None, expected: Tensor | None, least: float = 1e-30) -> float:
    """Return the largest difference, relative to the largest value, or to ``least``."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), least)


def run(
    name: str, data: int, spatial: int = 1, *, batch: int = 4, replicas: int | None = None, kernels: str = "torch"
) -> dict[str, float]:
    """Train two steps on the mesh and in one process; return the errors of everything."""
    case = VNET if name == "vnet" else CASES[name]
    torch.manual_seed(7)
    plain = case.build().double()
    torch.manual_seed(100 + (join_mesh(data, spatial).replica))  # as processes may have been seeded
    other = case.build().double()
    if join_mesh(data, spatial).replica == 0:
        other.load_state_dict(plain.state_dict())
    count = replicas or data
    model = wrap(other, data, spatial, count, kernels, fixed=False)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (plain, model)]
    numbers = torch.Generator().manual_seed(3)
    errors: dict[str, float] = {}
    for step in range(2):
        whole = torch.randn(batch, *case.shape, dtype=torch.float64, generator=numbers)
        expected = plain(whole)
        loss = compute_loss(expected)
        loss.backward()
        outputs, own_loss = take_step(model, whole)
        rows = torch.cat([torch.arange(batch)[model.replicas.deal(batch)[r]] for r in model.replicas.own])
        for index, (actual, wanted) in enumerate(zip(outputs, find_tensors(expected), strict=True)):
            errors[f"step {step}: output {index}"] = measure(actual.detach(), wanted.detach()[rows])
        errors[f"step {step}: loss"] = measure(own_loss, loss.detach())
        # The gradient of a bias in front of a norm is zero: what is there is round-off of the others'.
        largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
        for (key, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            errors[f"step {step}: gradient of {key}"] = measure(a.grad, b.grad, largest)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for key, value in plain.state_dict().items():
            errors[f"step {step}: {key}"] = measure(model.state_dict()[key], value)
    model.check_alike()
    plain.eval()
    model.eval()
    with torch.no_grad():
        for index, (a, b) in enumerate(zip(find_tensors(model(whole)), find_tensors(plain(whole)), strict=True)):
            errors[f"evaluation: output {index}"] = measure(a, b)
    return {key: error for key, error in errors.items() if not error <= TOLERANCE}


class Dropping(nn.Module):
    """Dropout of channels and of voxels, on fine levels and on one too coarse to cut, between norms and joins."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.InstanceNorm3d) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), norm(6), nn.LeakyReLU(), nn.Dropout3d(0.3))
        self.down = nn.Sequential(nn.Conv3d(6, 8, 3, stride=2, padding=1), norm(8), nn.LeakyReLU(), nn.Dropout(0.3))
        self.coarse = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(8, 8, 1), nn.Dropout(0.3), nn.Sigmoid())
        self.up = nn.ConvTranspose3d(8, 6, 2, stride=2)
        self.last = nn.Sequential(nn.Conv3d(12, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv3d(6, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        deep = self.down(x)
        deep = deep * self.coarse(deep)
        return self.last(torch.cat([x, self.up(deep)], 1))


BITS = {
    "dynunet": Case(build_dynunet, (1, 16, 8, 8)),
    "dropping": Case(Dropping, (1, 12, 8, 8)),
    "habits": Case(Habits, (1, 12, 7, 6)),
}


class Supervised(nn.Module):
    """A U-Net whose coarser levels have heads too."""

    def __init__(self) -> None:
        super().__init__()
        from volseg.models.networks import DynUNet

        kernels, strides = [3, 3, 3, 3], [1, 2, 2, 2]
        filters = [4, 6, 8, 8]
        self.net = DynUNet(
            3, 1, 2, kernels, strides, strides[1:], filters=filters, deep_supervision=True, deep_supr_num=2
        )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Convolutions(nn.Module):
    """Kernels, strides, dilations, paddings and groups, joins of joins, and inputs that several operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv3d(1, 4, 5, padding=2)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(4, affine=True) for _ in range(3))
        self.dilated = nn.Conv3d(4, 4, 3, padding=2, dilation=2)
        self.grouped = nn.Conv3d(4, 4, (3, 1, 3), padding=(1, 0, 1), groups=2, bias=False)
        self.joined = nn.Conv3d(12, 4, 3, padding=1)
        self.nested = nn.Conv3d(16, 4, 1)
        self.shrinking = nn.Conv3d(4, 4, 3)
        self.even = nn.Conv3d(4, 4, 2, stride=2)
        self.third = nn.Conv3d(4, 4, 3, stride=3, padding=1)
        self.up = nn.ConvTranspose3d(4, 3, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv3d(3, 2, 3, padding=1, padding_mode="zeros")

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.leaky_relu(self.norms[0](self.wide(x)))
        y = self.norms[1](self.dilated(x))
        z = F.relu(self.norms[2](self.grouped(x) + x))
        joined = torch.cat([x, F.elu(y), z], 1)
        deep = self.joined(joined) * self.nested(torch.cat([y, joined], 1)) + y
        deep = self.shrinking(deep + joined[:, 4:8])
        return [self.last(self.up(self.even(deep))), self.third(deep)]


def build_thin() -> nn.Module:
    """Return layers down to slabs of one voxel, whose layout in memory is anybody's guess, and wide kernels there."""
    layers: list[nn.Module] = [nn.Conv3d(1, 8, 1)]
    for channels in (8, 16, 32):
        layers += [nn.Conv3d(channels, 2 * channels, 2, stride=2), nn.BatchNorm3d(2 * channels), nn.ELU()]
    for _ in range(2):
        layers += [nn.Conv3d(64, 64, 5, padding=2), nn.BatchNorm3d(64), nn.ELU()]
    return nn.Sequential(*layers, nn.Conv3d(64, 2, 3, padding=1))


def build_norms() -> nn.Module:
    """Return norms with weights and without, of pairs and of groups, in front of convolutions."""
    norms = nn.InstanceNorm3d(4, affine=True), nn.InstanceNorm3d(4), nn.BatchNorm3d(4), nn.GroupNorm(2, 4)
    layers = [nn.Sequential(norm, nn.LeakyReLU(0.1), nn.Conv3d(4, 4, 3, padding=1)) for norm in norms]
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *layers)


PASSAGE = {
    "deep supervision": Case(Supervised, (1, 24, 8, 8)),
    "vnet": Case(NarrowVNet, (1, 32, 16, 16)),
    "norms": Case(build_norms, (1, 9, 4, 3)),
    "thin": Case(build_thin, (1, 16, 8, 8)),
    "batch norm": Case(build_normed(nn.BatchNorm3d), (1, 13, 7, 6)),
    "group norm": Case(build_normed(lambda n: nn.GroupNorm(2, n)), (1, 13, 7, 6)),
    "convolutions": Case(Convolutions, (1, 17, 9, 8)),
    "recomputed": Case(build_dynunet, (1, 20, 8, 8), checkpoint="all"),
    "finest recomputed, dropping": Case(Dropping, (1, 12, 8, 8), checkpoint=1),
    "half precision": Case(build_dynunet, (1, 20, 8, 8), autocast=True),
    "half precision, recomputed": Case(build_dynunet, (1, 20, 8, 8), checkpoint="all", autocast=True),
}
"""What slabs of one process and of several pass through alike."""


def train_bits(
    name: str, data: int, spatial: int, replicas: int, shards: int, steps: int = 3, fixed: bool = True
) -> dict[str, Tensor]:
    """Return what a training in float32 comes to: weights, gradients, losses."""
    case = (BITS | PASSAGE)[name]
    torch.manual_seed(7)
    net = case.build()
    kernels = f"slabs {shards}" if spatial == 1 and shards > 1 else "torch"
    model = wrap(net, data, spatial, replicas, kernels, fixed=fixed, checkpoint=case.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01) if name in PASSAGE else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    numbers = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        whole = torch.randn(max(replicas, 2) + 1, *case.shape, generator=numbers)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            _, loss = take_step(model, whole)
        found[f"loss {step}"] = loss
        found |= {f"gradient {step} {key}": p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {key: value.clone() for key, value in model.state_dict().items()}


def list_differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of what is not the same to the last bit."""
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]
