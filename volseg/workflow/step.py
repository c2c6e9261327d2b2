"""Train on one batch: forward, loss, backward and, once enough gradients are accumulated, the optimizer step."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.data.cases import Batch
from volseg.device.gpus import on_gpu
from volseg.errors import BatchFieldError, ConfigError
from volseg.parallel import ModelParallel, RecordedStep
from volseg.parallel.data_parallel import DataParallel, get_replicas
from volseg.parallel.devices import is_distributed
from volseg.parallel.fixed_order import RoundSums, fold
from volseg.parallel.replicas import Share
from volseg.workflow.distributed import is_cut_over_processes
from volseg.workflow.named import Named, Objective, require_mean_of_shares
from volseg.workflow.precision import Precision

Computed = tuple[dict[str, Tensor], Tensor | None]
"""Losses by name, and the overlap of the foreground."""


class TrainingStep:
    """Compute one batch's gradients, and take the optimizer step when it is due.

    Parameters
    ----------
    model : Named
        The network.
    objective : Objective
        Loss to minimise.
    optimizer : Optimizer
        Optimizer of the model's parameters.
    precision : Precision
        Precision of the forward pass and the loss.
    clip : float, optional
        Largest norm of the gradient.
    record : bool
        Record the step as a CUDA graph if possible; every batch must then be a whole step.
    batch_size : int, optional
        Samples of a whole batch; this process gets those of its own replicas. Required with several replicas.
    look : callable
        Gets the losses on a CPU before the weights change; may raise.

    Attributes
    ----------
    scaler : GradScaler
        Scaler for half precision; otherwise idle.
    recorded : RecordedStep or None
    cases : sequence of str
        Cases of the next batch, for messages.
    gradient_norm : Tensor or None
        Norm of the last whole step before clipping, on the device; None before the first step. It covers the gradients
        of all shards and replicas, so it is the same in every process.
    overlap : Tensor or None
        Overlap of the foreground of the last whole batch, ``(3, F)``, on the device; see `Objective.compute`.
    """

    def __init__(
        self,
        model: Named,
        objective: Objective,
        optimizer: Optimizer,
        precision: Precision,
        *,
        clip: float | None,
        record: bool,
        batch_size: int | None = None,
        look: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        assert isinstance(model.module, nn.Module)
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.precision = precision
        self.clip = clip
        self.look = look
        self.cases: Sequence[str] = ()
        self.replicated = model.module if isinstance(model.module, DataParallel) else None
        self.batch_size = batch_size
        if self.replicated is not None and batch_size is None:
            raise ConfigError(
                f"the network's {self.replicated.replicas.count} replicas share each batch, but the batches do not "
                "state its size; set their attribute batch_size to the number of samples of all replicas together"
            )
        self.scaler = precision.scaler()
        self._is_tried = False
        self.gradient_norm: Tensor | None = None
        self.overlap: Tensor | None = None
        self.recorded: RecordedStep | None = None
        if record and not self.scaler.is_enabled() and can_be_recorded(model.module, optimizer):
            self.recorded = RecordedStep(model.module, self._run, optimizer=optimizer)

    def __call__(
        self, tensors: Mapping[str, Tensor], *, gathered: int = 1, completes: bool = True
    ) -> dict[str, Tensor]:
        """Train on a batch; return its losses.

        Parameters
        ----------
        tensors : mapping
            Fields of the batch.
        gathered : int
            Batches whose gradients one optimizer step averages.
        completes : bool
            Whether this batch is the last of the step.
        """
        if self.recorded is None:
            losses, overlap, norm = self._run(tensors, gathered, completes)
        else:
            assert gathered == 1, "a recorded step is whole"
            losses, overlap, norm = self.recorded(tensors)
            losses = {name: loss.clone() for name, loss in losses.items()}  # the next replay overwrites them
            overlap, norm = overlap if overlap is None else overlap.clone(), norm.clone()
        self.gradient_norm = norm if norm is not None else self.gradient_norm
        self.overlap = overlap
        return losses

    def check_replicas(self) -> None:
        """Raise if the networks of replicas differ, because one loaded a state or changed a buffer.

        Replicas are compared before the first steps and once per epoch, as each comparison waits for the device. Shards
        are not compared: equal computations of several shards may round differently on a GPU.
        """
        if self.replicated is not None and self.batch_size is not None:
            device = next(self.replicated.parameters()).device
            self.replicated.replicas.require_alike(device, batch_size=self.batch_size)
            self.replicated.check_alike(shards=False)

    def release(self) -> None:
        """Free the recording, if there is one."""
        if self.recorded is not None:
            self.recorded.release()

    def _run(
        self, tensors: Mapping[str, Tensor], gathered: int = 1, completes: bool = True
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """Return the batch's losses and overlap, and the gradient norm if the batch completes a step."""
        losses, overlap = self._compute_gradients(tensors, gathered)
        if next(iter(losses.values())).device.type == "cpu":  # the check costs nothing on a CPU
            self.look(losses)
        return losses, overlap, self._take_step() if completes else None

    def _take_step(self) -> Tensor:
        """Take an optimizer step; return the gradient norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        if self.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        else:
            gradients = (parameter.grad for parameter in self.model.parameters())
            norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def _compute_gradients(self, tensors: Mapping[str, Tensor], gathered: int) -> Computed:
        """Accumulate the batch's gradients; return its losses and overlap."""
        if self.replicated is None:
            return self._compute_share(tensors, gathered)
        return self._compute_shares(self.replicated, tensors, gathered)

    def _compute_shares(self, model: DataParallel, tensors: Mapping[str, Tensor], gathered: int) -> Computed:
        """Compute this process's replicas one after the other; return the losses and overlap of the whole batch."""
        assert self.batch_size is not None
        shares = model.replicas.shares(self.batch_size)
        _require_rows(tensors, shares[-1].rows.stop, self.batch_size)
        rounds = []
        sums = RoundSums(model.parameters(), len(shares)) if len(shares) > 1 else None
        for share in shares:
            own = tensors if len(shares) == 1 else {name: value[share.rows] for name, value in tensors.items()}
            losses, overlap = self._compute_share(own, gathered, share)
            means = torch.stack([losses[name] for name in self.objective.names]) * share.weight
            rounds.append(means if overlap is None else torch.cat([means, overlap.flatten()]))
            if sums is not None:
                sums.push()
        if sums is not None:
            sums.put_back()
        values = fold(model.replicas.sum_values(torch.stack(rounds)).unbind(), torch.add)
        means, added = values.split([count := len(self.objective.names), len(values) - count])
        losses = dict(zip(self.objective.names, means.unbind(), strict=True))
        return losses, None if overlap is None else added.unflatten(0, overlap.shape)

    def _compute_share(self, tensors: Mapping[str, Tensor], gathered: int, share: Share | None = None) -> Computed:
        """Accumulate the gradients of one replica; return its losses and overlap."""
        place: AbstractContextManager[None] = nullcontext()
        if self.replicated is not None and share is not None:
            place = self.replicated.as_replica(share.replica)
        with place:
            with self.precision.autocast():
                outputs = self.model(tensors)
                if share is not None and not self._is_tried:
                    with torch.autocast(self.precision.device_type, enabled=False):
                        require_mean_of_shares(self.objective, tensors, outputs)
                    self._is_tried = True
                cases = self.cases if share is None else self.cases[share.rows]
                fields, overlap = self.objective.compute({"case": cases, **tensors, **outputs})
            loss = fields["loss"] / gathered
            if not loss.requires_grad:
                raise ConfigError("the loss has no gradient; compute it from network outputs, without detach()")
        self.scaler.scale(loss if share is None else loss * share.weight).backward()
        return {name: fields[name].detach() for name in self.objective.names}, overlap


def _require_rows(tensors: Mapping[str, Any], num_rows: int, batch_size: int) -> None:
    if wrong := {name: tuple(value.shape) for name, value in tensors.items() if value.shape[:1] != (num_rows,)}:
        name, shape = next(iter(wrong.items()))
        raise BatchFieldError(
            f"this process computes {num_rows} of a batch's {batch_size} samples, but the batch's field {name!r} has "
            f"the shape {shape}; it needs one row per sample (volseg.data.AugmentedBatches selects rows with rows=)"
        )


def can_be_recorded(network: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether the step on ``network`` runs the same kernels each time, on one GPU per process.

    The optimizer must be fused, so that it reads its learning rate from the device.
    """
    if isinstance(network, ModelParallel):
        one = network.strategy.is_recordable
    else:
        one = len({parameter.device for parameter in network.parameters()}) == 1
    on_gpus = all(on_gpu(parameter) for parameter in network.parameters())
    fused = all(group.get("fused") for group in optimizer.param_groups)
    together = is_cut_over_processes(network) or get_replicas(network) is not None or not is_distributed()
    return one and on_gpus and fused and together


def count_batches(batches: Any) -> int:
    """Return the number of batches per epoch, which sets the schedule and the end of each epoch.

    Raises
    ------
    ConfigError
        If the batches have no length, or are empty.
    """
    try:
        count = len(batches)
    except TypeError:
        raise ConfigError(
            f"batches need a length, the number of batches in an epoch, got a {type(batches).__name__}; pass a "
            "DataLoader, a list, or an object with __len__ and __iter__"
        ) from None
    if count < 1:
        raise ConfigError("batches are empty; an epoch needs at least one (a DataLoader's drop_last may drop it)")
    return count


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device; copies from pinned memory are asynchronous.

    Raises
    ------
    BatchFieldError
        If the batch is not a dict of fields.
    """
    if not isinstance(batch, Mapping):
        raise BatchFieldError(
            'a batch must be a dict of fields such as {"image": (B, C, D, H, W), "label": (B, 1, D, H, W)}, got a '
            f"{type(batch).__name__}; make the data set return a dict for each sample"
        )
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def count_voxels(image: Tensor | None, samples: int | None) -> int | None:
    """Return the number of voxels of a whole batch; None without images.

    Parameters
    ----------
    image : Tensor or None
        ``(B, C, ...)``.
    samples : int or None
    """
    if image is None or image.ndim < 3:
        return None
    return (samples or image.shape[0]) * math.prod(image.shape[2:])
