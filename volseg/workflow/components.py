"""Build the losses, metrics and optimizers that a config names; select parts of a network by parameter names."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from types import ModuleType
from typing import Any

import monai.losses
import monai.metrics
import torch
from monai.losses import DeepSupervisionLoss
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.config.nearest import did_you_mean
from volseg.config.registry import Registry
from volseg.device.module_internals import Loss, NormBase
from volseg.errors import BatchFieldError, ConfigError
from volseg.losses.known_voxels import Targets
from volseg.losses.monai import DiceCELoss
from volseg.workflow.named import Named


def _classes(module: ModuleType, base: type) -> dict[str, Callable[..., Any]]:
    """Return the public classes of ``module`` that derive from ``base``, by name."""
    members = inspect.getmembers(module, inspect.isclass)
    return {name: member for name, member in members if issubclass(member, base) and member is not base}


# Parameters of MONAI's losses for logits and a label map (B, 1, D, H, W), the inputs of our segmentation losses.
SEGMENTATION = {"to_onehot_y": True, "softmax": True, "use_softmax": True}

OVERLAPPING = ("DiceLoss", "DiceFocalLoss", "FocalLoss", "GeneralizedDiceLoss", "TverskyLoss")
"""MONAI's losses that are correct for overlapping volumes, with a sigmoid each. ``DiceCELoss`` is not: its cross
entropy always uses a softmax."""

OVERLAPS = ("DiceMetric", "GeneralizedDiceScore", "MeanIoU")
DISTANCES = ("HausdorffDistanceMetric", "SurfaceDiceMetric", "SurfaceDistanceMetric")
"""Metrics in mm, which need the spacing."""

OTHER_LOOPS = ("LBFGS", "Muon", "SparseAdam")
"""Optimizers for closures, for matrices, and for sparse gradients."""


def _losses() -> dict[str, Callable[..., Any]]:
    """Return MONAI's losses on logits; others (registration, probabilities) would be silently wrong."""
    registry = Registry("loss", _classes(monai.losses, Loss))
    taken = {
        name: loss
        for name, loss in registry.items()
        if (registry.accepts(name, "softmax") or registry.accepts(name, "use_softmax"))
        and loss.__name__ == name  # `dice_ce` and others are aliases
        and not name.startswith("Masked")  # needs a mask, which no batch has
    }
    return {**taken, "DiceCELoss": DiceCELoss}


LOSSES = Registry("loss", _losses())
METRICS = Registry("metric", {name: getattr(monai.metrics, name) for name in (*OVERLAPS, *DISTANCES)})
OPTIMIZERS = Registry(
    "optimizer", {name: each for name, each in _classes(torch.optim, Optimizer).items() if name not in OTHER_LOOPS}
)

FUSED = ("Adam", "AdamW", "SGD")


def is_fused_on_gpu(spec: Mapping[str, Any]) -> bool:
    """Return whether `build_optimizer` builds a fused optimizer on a GPU, whose step can be captured."""
    asks_otherwise = spec.get("foreach") or spec.get("differentiable")  # torch refuses to fuse these
    return bool(spec.get("fused", spec["name"] in FUSED and not asks_otherwise))


def build_loss(spec: Mapping[str, Any], *, inputs: Iterable[str], output: str, targets: Targets | None = None) -> Named:
    """Return a loss on logits ``(B, K, D, H, W)`` and a label map ``(B, 1, D, H, W)``, or on other fields.

    MONAI's losses compute the softmax and the one-hot form themselves, unless the spec says otherwise. A list of logits
    (deep supervision, full resolution first) gets `monai.losses.DeepSupervisionLoss`'s weights. Class weights become a
    tensor.

    If the label maps have more than one class per value, ``DiceCELoss`` is that of `volseg.losses.known_voxels`. A
    custom loss with a parameter ``targets`` gets the targets. MONAI's losses of `OVERLAPPING` support regions. Other
    losses are refused: their values would be wrong.

    Parameters
    ----------
    spec : mapping
        Name and parameters.
    inputs, output
        Fields of the batch, and the name of the loss.
    targets : Targets, optional
        Content of the label maps; by default one class per value.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a loss that does not support the targets.
    """
    LOSSES.check(spec)
    is_own = LOSSES.get_source(spec["name"]) is not None
    weights = {"weight": torch.tensor(spec["weight"])} if isinstance(spec.get("weight"), list | tuple) else {}
    if targets is not None and not targets.is_plain:
        loss = _build_for(targets, {**spec, **weights})
    else:
        wanted = {key for key in SEGMENTATION if not is_own and LOSSES.accepts(spec["name"], key)}
        loss = LOSSES.build({**{key: SEGMENTATION[key] for key in wanted}, **spec, **weights})
    if not callable(loss):
        raise ConfigError(f"loss {spec['name']} must build a callable, got a {type(loss).__name__}")
    return Named(AnyDepth(loss), list(inputs), [output])


def _build_for(targets: Targets, spec: Mapping[str, Any]) -> nn.Module:
    """Return a loss that supports regions, ignored voxels or hidden classes."""
    name = spec["name"]
    if LOSSES.accepts(name, "targets"):
        own: nn.Module = LOSSES.build(spec, targets=targets)
        return own
    if targets.regions and (spec.get("softmax") or spec.get("use_softmax")):
        raise ConfigError(f"loss {name} has softmax: true, but regions overlap; remove softmax from the config")
    if LOSSES[name] is DiceCELoss:
        # Regions always use a sigmoid; a config may repeat the parameter.
        parameters = {key: value for key, value in spec.items() if not (targets.regions and key == "sigmoid")}
        loss: DiceCELoss = LOSSES.build({"softmax": True, "to_onehot_y": True, **parameters})
        return loss.take_targets(targets)
    if not targets.regions or targets.ignores or targets.hidden or name not in OVERLAPPING:
        kinds = {"regions": targets.regions, "ignored voxels": targets.ignores, "hidden classes": targets.hidden}
        held = ", ".join(kind for kind, is_so in kinds.items() if is_so)
        raise ConfigError(
            f"loss {name} does not support label maps with {held}; use DiceCELoss, or your own loss with a parameter "
            "'targets' (volseg.losses.Targets)"
        )
    # Without include_background the loss would skip its first output, as if it were the background.
    activation = {key: True for key in ("sigmoid", "include_background") if LOSSES.accepts(name, key)}
    return OfRegions(LOSSES.build({**spec, **activation}), targets)


class OfRegions(nn.Module):
    """Apply a loss of overlapping one-hot volumes to a label map."""

    def __init__(self, loss: nn.Module, targets: Targets) -> None:
        super().__init__()
        self.loss = loss
        self.targets = targets
        self.__name__ = type(loss).__name__

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss of logits ``(B, R, D, H, W)`` and a label map ``(B, 1, D, H, W)`` of classes."""
        # Comparisons, not torch.isin: sharded volumes support them, and they copy nothing from the host.
        is_class = [(label == index).to(logits.dtype) for index in range(self.targets.num_classes)]
        volumes = [reduce(torch.add, [is_class[index] for index in region]) for region in self.targets.regions]
        result: Tensor = self.loss(logits, torch.cat(volumes, 1))
        # An unknown value would silently count as outside of all regions.
        return result * torch.where((label >= self.targets.num_classes).any(), torch.nan, 1.0)


def build_metric(
    spec: Mapping[str, Any],
    *,
    inputs: Iterable[str],
    output: str,
    num_classes: int | None = None,
    columns: Sequence[Sequence[int]] | None = None,
) -> Named:
    """Return a MONAI metric of label maps ``(1, 1, D, H, W)``, over the foreground unless the spec says otherwise.

    For a metric of distances, the inputs end with the field ``spacing`` (mm along D, H, W).

    Parameters
    ----------
    spec : mapping
        Name and parameters.
    inputs, output
        Fields of a case, and the name of the metric.
    num_classes : int, optional
        Number of classes; label maps contain 0 to ``num_classes - 1``.
    columns : sequence, optional
        Replaces ``num_classes``: the label values of each column of the one-hot form, either ``(0,)`` first and one
        value each, or the values of each region.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or if the first region would be left out.
    """
    METRICS.check(spec)
    if columns is None:
        assert num_classes is not None, "a metric needs num_classes or columns"
        columns = [(index,) for index in range(num_classes)]
    takes, has_background = METRICS.accepts(spec["name"], "include_background"), tuple(columns[0]) == (0,)
    defaults = {"include_background": not has_background} if takes else {}
    if not has_background and takes and not spec.get("include_background", True):
        raise ConfigError(
            f"metric {spec['name']} skips the first column (include_background: false), but it is a region, not the "
            "background; remove include_background from the config"
        )
    metric = OneHot(METRICS.build({**defaults, **spec}), columns)
    return Named(metric, [*inputs, *(["spacing"] if spec["name"] in DISTANCES else [])], [output])


class OneHot(nn.Module):
    """Apply a metric of one-hot volumes to label maps."""

    def __init__(self, metric: Callable[..., Any], columns: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.metric = metric
        self.columns = [tuple(values) for values in columns]

    def forward(self, prediction: Tensor, label: Tensor, spacing: Sequence[float] | None = None) -> Tensor:
        """Return the metric of ``(B, 1, D, H, W)`` label maps, per case and column."""
        # MONAI accepts label maps without an error: its MeanIoU of them is a number above 1.
        volumes = [self._split(volume.as_subclass(Tensor)) for volume in (prediction, label)]
        result = self.metric(*volumes, **({} if spacing is None else {"spacing": tuple(spacing)}))
        assert isinstance(result, Tensor)
        return result

    def _split(self, label_map: Tensor) -> Tensor:
        rows = [torch.isin(label_map, torch.tensor(values, device=label_map.device)) for values in self.columns]
        return torch.cat(rows, 1).float()


class AnyDepth(nn.Module):
    """Apply a loss to one volume of logits, or sum it over the heads of deep supervision, each with its weight."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.plain = loss
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)  # for messages
        self.deep = DeepSupervisionLoss(loss)

    def forward(self, logits: Tensor | list[Tensor], *others: Any) -> Tensor:
        """Return the scalar loss of ``logits`` and a label map, or of other fields that the loss reads."""
        if not isinstance(logits, list | tuple):
            return self.plain(logits, *others)
        if len(others) != 1:
            raise BatchFieldError(
                f"{self.__name__} gets {1 + len(others)} fields, but with deep supervision ({len(logits)} volumes of "
                "logits) a loss needs two, logits and a label map; turn deep supervision off, or pass only these two"
            )
        (label,) = others
        weights = self.deep.get_weights(levels=len(logits))
        if isinstance(self.plain, DiceCELoss) and self.plain.is_fused:
            heads = zip(weights, logits, strict=True)
            return torch.stack([self.plain.of_head(head, label, weight) for weight, head in heads]).sum()
        # DeepSupervisionLoss.forward starts its sum with a host number, which a CUDA graph cannot capture.
        if label.dtype == torch.int64:  # torch cannot resize int64; the values are exact in float32
            label = label.float()
        terms = [weight * self.deep.get_loss(head, label) for weight, head in zip(weights, logits, strict=True)]
        return torch.stack(terms).sum()


def build_optimizer(
    spec: Mapping[str, Any], network: nn.Module, *, on_gpu: bool, parts: Mapping[str, Mapping[str, Any]] = {}
) -> Optimizer:
    """Return an optimizer over the trainable parameters, fused on a GPU if torch supports it.

    With a fused optimizer the host does not wait for the gradient scaler's check for infinities.

    Parameters
    ----------
    spec : mapping
        Name and parameters.
    network : nn.Module
        Network to train; parameters that require no gradient are left out.
    on_gpu : bool
        Whether the parameters are on a GPU.
    parts : mapping, optional
        Other settings for parameters by patterns of their names; see `group_parameters`.

    Raises
    ------
    ConfigError
        For an unknown name, parameter, part or setting.
    """
    OPTIMIZERS.check(spec)
    fused = {"fused": True} if on_gpu and is_fused_on_gpu(spec) else {}
    optimizer = OPTIMIZERS.build({**fused, **spec}, group_parameters(network, parts))
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer {spec['name']} must build a torch.optim.Optimizer, got a {type(optimizer).__name__}"
        )
    for settings in parts.values():  # torch checks settings only if they are the defaults of all parameters
        OPTIMIZERS.build({**spec, **settings}, [nn.Parameter(torch.zeros(1))])
    return optimizer


# Parts of a network, by patterns of its parameters' names: frozen, or with a separate learning rate.
#
# Names are those of the plain network, without its wrappers. In a pattern, ``*`` matches any text, dots included. A
# pattern without a match is refused: it could leave a part training that the user believes frozen.


GLOBAL_SETTINGS = frozenset({"capturable", "differentiable", "foreach", "fused", "maximize", "params"})
"""Settings of an optimizer that must be the same for all parameters."""


def match_parameters(patterns: Iterable[str], names: Sequence[str], setting: str) -> dict[str, list[str]]:
    """Return the names that each pattern matches.

    Raises
    ------
    ConfigError
        For a pattern without a match; the message lists the nearest names.
    """
    matched = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern in [pattern for pattern, found in matched.items() if not found]:
        stem = pattern.partition("*")[0].rstrip(".") or pattern
        parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
        near = get_close_matches(stem, parts, n=3) or {name.partition(".")[0] for name in names}
        near = [part if part in names else f"{part}.*" for part in near]  # the name of a part matches no parameter
        raise ConfigError(f"{setting}: no parameter matches {pattern!r}; {did_you_mean(stem, near)}")
    return matched


def freeze_parts(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters that ``patterns`` match; return their names.

    Raises
    ------
    ConfigError
        For a pattern without a match, or if no parameter would be left to train.
    """
    names = [name for name, _ in network.named_parameters()]
    frozen = {name for found in match_parameters(patterns, names, "training.frozen").values() for name in found}
    if frozen and frozen == set(names):
        raise ConfigError(f"training.frozen: {list(patterns)} match all {len(names)} parameters; leave some trainable")
    for name, parameter in network.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return [name for name in names if name in frozen]


def list_frozen_norms(network: nn.Module) -> list[nn.Module]:
    """Return the norms with running statistics in frozen parts of a network.

    All parameters of such a norm are frozen. A norm without parameters belongs to the smallest enclosing part with
    parameters.
    """
    modules = dict(network.named_modules())
    found: list[nn.Module] = []
    for path, module in modules.items():
        if not (isinstance(module, NormBase) and module.running_mean is not None):
            continue
        around = (modules[part] for part in _paths_upwards(path))
        part = next((one for one in around if any(True for _ in one.parameters())), None)
        if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):
            found.append(module)
    return found


def group_parameters(network: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the trainable parameters as groups for an optimizer: first the parameters outside all parts.

    Raises
    ------
    ConfigError
        For a pattern that matches no trainable parameter, a parameter in two parts, or a setting of `GLOBAL_SETTINGS`.
    """
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    groups, part_of = [], dict[str, str]()
    for pattern, found in match_parameters(parts, list(trained), "optimizer.parts").items():
        if shared := sorted(GLOBAL_SETTINGS & parts[pattern].keys()):
            raise ConfigError(f"optimizer.parts: {pattern}: {shared[0]} must be the same for all parameters; remove it")
        if twice := [name for name in found if name in part_of]:
            raise ConfigError(
                f"optimizer.parts: {twice[0]} is matched by {part_of[twice[0]]!r} and {pattern!r}; narrow one of them"
            )
        part_of.update(dict.fromkeys(found, pattern))
        groups.append({"params": [trained[name] for name in found], **parts[pattern]})
    rest = [parameter for name, parameter in trained.items() if name not in part_of]
    return [{"params": rest}, *groups] if rest else groups


def _paths_upwards(path: str) -> Iterator[str]:
    """Yield a module's path and the paths of its enclosing modules, the network last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
