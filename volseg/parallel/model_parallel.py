"""``ModelParallel``: one ``nn.Module`` that runs a plain network over several devices.

The wrapper is a thin dispatcher. A *strategy* object places and runs the network: the strategy of ``Spatial`` cuts the
volume into slabs, that of ``Pipeline`` cuts the network into stages. All operations of a training loop on a module
(parameters, state, modes) reach the plain network under the plain network's names.

``strategy="auto"`` chooses at the first batch, which defines the size of volumes. On several GPUs of one process,
``volseg.estimate`` estimates the candidates then, and the fastest that fits is taken. Elsewhere, and if a network
cannot run on fake tensors, the choice is the spatial split, whose error for an operator without a sharded form names
the pipeline.

``.cuda()`` and ``.to(device)`` raise: a move would break the placement.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from volseg.device.first_order import refuse_forward_mode
from volseg.device.module_internals import (
    BUFFERS,
    MODULES,
    NOT_PERSISTENT,
    PARAMETERS,
    apply_to_tensors,
    load_from_state_dict,
)
from volseg.device.torch_internals import left_out_of_compilation
from volseg.errors import ParallelError, PlacementError
from volseg.parallel.devices import Devices, name_devices, require_visible
from volseg.parallel.pipeline import Pipeline, PipelineStrategy
from volseg.parallel.spatial import Spatial, SpatialStrategy
from volseg.parallel.state.module import REGISTRIES
from volseg.parallel.state.random import CommonSeeds, own_random_numbers

logger = logging.getLogger(__name__)

CHOOSER = "volseg.estimate.network_plan"
"""Module that estimates a network's step. It runs models of this module, so it is imported only when needed."""

SHARED_REGISTRIES = PARAMETERS, BUFFERS, MODULES, NOT_PERSISTENT
"""Attributes that the wrapper and its network share."""

OWN_REGISTRIES = REGISTRIES.difference(SHARED_REGISTRIES)
"""Attributes in which the wrapper keeps its own hooks."""

Copy = TypeVar("Copy", bound="ModelParallel")


class StrategyOptions(TypedDict, total=False):
    """Options of ``Spatial`` and ``Pipeline`` that ``ModelParallel`` accepts, declared for type checkers."""

    axes: Sequence[str] | str | None
    grid: Sequence[int] | None
    channels_last: bool | None
    offload: bool
    fixed_order: bool
    cuts: Sequence[str] | None
    record: bool | Literal["auto"]
    batched: Sequence[int | str] | None
    replicated: bool


Options: TypeAlias = Spatial | Pipeline
"""Options of a strategy: a frozen value, copied and pickled with the model."""

STRATEGIES: dict[str, type[Options]] = {"spatial": Spatial, "pipeline": Pipeline}


class ModelParallel(nn.Module):
    """Run a network over several devices, exactly as on one.

    Parameters
    ----------
    net
        Any module. It is used in place (not copied) and stays reachable as ``.module``.
    strategy
        ``Spatial(...)`` cuts volumes into slabs, ``Pipeline(...)`` cuts the layers into stages; ``"spatial"`` and
        ``"pipeline"`` are these with the options below. ``"auto"`` takes the pipeline if ``split_size`` is given.
        Otherwise, on several GPUs of one process, it estimates the candidates at the first batch and takes the fastest
        that fits. On a CPU, and on several processes, it takes the spatial split, which also divides a batch of one.
    devices
        Devices of this process; all visible GPUs by default (the CPU without GPUs). A device may be named several
        times. Under ``torchrun`` each process has one device, and the shards are the processes of ``mesh``.
    split_size
        See ``Pipeline``.
    mesh
        A ``torch.distributed.device_mesh.DeviceMesh``. A dimension named ``"data"`` holds replicas, whose gradients are
        averaged; each other dimension cuts one axis of the volume. By default all processes share each volume.
    on_unsupported, checkpoint
        See ``Spatial``.
    options
        Further options of the strategy, see ``Spatial`` and ``Pipeline``. ``replicated=False`` states that all
        processes already hold the same weights.

    Attributes
    ----------
    chosen, why : str
        The strategy in use, ``"spatial"`` or ``"pipeline"``, and the reason.

    Raises
    ------
    ParallelError
        If the strategy is unknown or has no such option, or the devices do not fit or do not exist.

    Notes
    -----
    A spatial split's outputs are sharded volumes. ``output.full_tensor()`` gathers one into a plain tensor.
    ``volseg.parallel.whole(function)`` returns a function that gathers its arguments first, such as a metric that uses
    NumPy.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Conv3d(1, 2, 3, padding=1)
    >>> model = ModelParallel(net, strategy=Spatial(axes="D"), devices=["cpu", "cpu"])
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    >>> model(torch.zeros(1, 1, 8, 8, 8)).full_tensor().shape
    torch.Size([1, 2, 8, 8, 8])
    """

    module: nn.Module
    strategy: SpatialStrategy | PipelineStrategy

    def __init__(
        self,
        net: nn.Module,
        strategy: str | Options = "auto",
        devices: Devices = None,
        split_size: int | str | None = None,
        mesh: Any = None,
        on_unsupported: Literal["raise", "gather"] = "raise",
        checkpoint: str | int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__()
        check_network(net)
        if devices is not None:
            require_visible(name_devices(devices))
        replicated = options.pop("replicated", True)
        named = {"split_size": split_size, "on_unsupported": on_unsupported, "checkpoint": checkpoint}
        defaults = {"split_size": None, "on_unsupported": "raise", "checkpoint": None}
        given = {name: value for name, value in named.items() if value != defaults[name]} | options
        found, self.why = _choose(strategy, given)
        self.chosen, self._options = found.name, found
        if strategy == "auto":
            logger.info("ModelParallel(strategy='auto') takes %s: %s", self.chosen, self.why)
        self._arguments = dict(strategy=strategy, devices=devices, mesh=mesh, **given)
        # Registered nowhere: a registered child would put "module." before every key.
        object.__setattr__(self, "module", net)
        object.__setattr__(self, "strategy", None)
        object.__setattr__(self, "strategy", found.build(net, devices, mesh, replicated=replicated))
        may_change = strategy == "auto" and self.chosen == "spatial" and not given and mesh is None
        self._tries = may_change and not self.strategy.is_shared
        self._share_registries()
        self.training = net.training

    def _share_registries(self) -> None:
        """Share the network's own dictionaries, so that recursion over modules sees its plain names."""
        for name in SHARED_REGISTRIES:
            object.__setattr__(self, name, getattr(self.module, name))

    @left_out_of_compilation
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network over the devices; spatial outputs are sharded volumes."""
        refuse_forward_mode(type(self).__name__)
        if self._tries:
            self._choose_for(args, kwargs)
        return self.strategy(*args, **kwargs)

    def _choose_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the strategy that is estimated to be fastest for the first batch, if there is an estimate."""
        with own_random_numbers(()):  # libraries draw while they are imported
            chooser = import_module(CHOOSER)
        choice = None if kwargs else chooser.choose_for_first_batch(self.module, self._devices, args)
        self._tries = False
        if choice is None:
            return
        options, self.why = choice
        self.chosen = options.name
        if options != self._options:
            self._options = options
            object.__setattr__(self, "strategy", options.build(self.module, self._arguments["devices"]))

    @property
    def _devices(self) -> Sequence[torch.device]:
        return name_devices(self._arguments["devices"])

    @property
    def partition(self) -> Any:
        """Assignment of layers or volumes to devices; print it."""
        return self.strategy.partition

    @property
    def seeds(self) -> CommonSeeds | None:
        """Generators that the processes share, for checkpoints; None if each pass uses the default generators."""
        return self.strategy.seeds

    def train(self, mode: bool = True) -> "ModelParallel":
        """Set the mode of the network and of the wrapper."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain network's state under its plain keys."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        load_from_state_dict(self.module, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ModelParallel":
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            moved = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            if moved != tensor.device:
                raise PlacementError(
                    f"the parameters of this ModelParallel are placed on {tensor.device} and cannot be moved to "
                    f"{moved}; pass devices=[...] to ModelParallel instead of calling .to(), .cuda() or .cpu()"
                )
        apply_to_tensors(self.module, fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelParallel":
        # Devices and groups are shared; the network is copied. A process may copy without the others: nothing is sent.
        arguments: dict[str, Any] = {**self._arguments, "replicated": False}
        result = ModelParallel(copy.deepcopy(self.module, memo), **arguments)
        if self.seeds is not None and result.seeds is not None:
            result.seeds.follow(self.seeds)
        return self._hand_over(result, memo)

    def _hand_over(self, result: Copy, memo: dict[int, Any]) -> Copy:
        """Copy the wrapper's own attributes to a copy of it, and return the copy."""
        memo[id(self)] = result  # a hook may be a method of this object
        vars(result).update(copy.deepcopy(self._list_own(), memo))
        return result

    def _list_own(self) -> dict[str, Any]:
        """Return the hooks registered on the wrapper itself, for copies and pickles."""
        return {name: value for name in OWN_REGISTRIES if (value := vars(self)[name])}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network and the arguments; loading requires the same devices."""
        if self._arguments["mesh"] is not None:
            raise ParallelError(
                "a ModelParallel on a mesh cannot be pickled, as process groups belong to the running processes; save "
                "model.state_dict(), or pickle model.module, and wrap that again"
            )
        return _rebuild, (self.module, self._arguments), self._list_own()

    def extra_repr(self) -> str:
        """Format the strategy."""
        return type(self.strategy).__name__


def _choose(strategy: str | Options, given: Mapping[str, Any]) -> tuple[Options, str]:
    """Return the options of the initial strategy, and the reason."""
    if isinstance(strategy, Options):
        if given:
            raise ParallelError(
                f"{', '.join(given)} cannot be combined with strategy={type(strategy).__name__}(...); pass options to "
                f"{type(strategy).__name__}(...)"
            )
        return strategy, "requested"
    if strategy not in ("auto", *STRATEGIES):
        raise ParallelError(
            f"strategy must be one of auto, {', '.join(STRATEGIES)}, got {strategy!r}; or Spatial(...), Pipeline(...)"
        )
    name, why = str(strategy), "requested"
    if strategy == "auto":
        is_cut = "split_size" in given
        name = "pipeline" if is_cut else "spatial"
        why = f"split_size={given['split_size']!r} was given" if is_cut else "no split_size was given"
    options = STRATEGIES[name]
    if unknown := sorted(given.keys() - _list_names(options)):
        raise ParallelError(
            f"{unknown[0]}={given[unknown[0]]!r} is not an option of {options.noun} ({why}), which has "
            f"{', '.join(sorted(_list_names(options)))}; leave it out, or pass another strategy="
        )
    return options(**given), why


def _list_names(options: type[Options]) -> set[str]:
    return {field.name for field in fields(options)}


def check_network(net: nn.Module) -> None:
    """Refuse an object that is not a network, and lazy parameters: placement comes before the first batch."""
    if not isinstance(net, nn.Module):
        raise ParallelError(f"the network must be a torch.nn.Module, got {net!r}")
    lazy = [name for name, tensor in (*net.named_parameters(), *net.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ParallelError(
            f"{', '.join(lazy)} of {type(net).__name__} have no shape yet (lazy modules); run one batch through the "
            "plain network under torch.no_grad() before wrapping it"
        )


def _rebuild(net: nn.Module, arguments: dict[str, Any]) -> ModelParallel:
    return ModelParallel(net, **arguments)
