"""The training loop.

``Training.run`` reads like pseudocode; hooks do everything around it. Within an epoch the loop waits for the device
only once in ``CHECK_EVERY`` batches, or in two seconds if these take longer. It then checks the losses so far, keeps
the newest ones for display, and checks for signals.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.checkpointing.file import random_state, restore, restore_random_state
from volseg.checkpointing.state import EpochRecord, TrainingState
from volseg.data.augmented import EpochBatches, remaining_batches
from volseg.data.cases import Batch
from volseg.errors import ConfigError
from volseg.parallel.devices import is_main_process
from volseg.parallel.processes.group import gather_over_processes
from volseg.parallel.processes.progress import report_progress
from volseg.workflow.checks import CHECK_EVERY, EpochClock, EpochLosses, Stopping, StopRequested
from volseg.workflow.hooks import Hook
from volseg.workflow.named import Loss, Named, Objective
from volseg.workflow.precision import Precision
from volseg.workflow.schedules import Schedule, WeightAverage, constant
from volseg.workflow.step import TrainingStep, count_batches, count_voxels, to_device

__all__ = ["CHECK_EVERY", "Score", "Training"]

logger = logging.getLogger(__name__)


class Score(Protocol):
    """Result of a validation."""

    @property
    def score(self) -> float:
        """The number by which epochs are compared; larger is better."""

    @property
    def scores(self) -> Mapping[str, float]:
        """Further numbers by name."""


ScoreT = TypeVar("ScoreT", bound=Score)


class Training:
    """Update a model once per batch, epoch after epoch.

    Parameters
    ----------
    model : Named or nn.Module
        The network. It trains where its parameters are. One that is not `Named` maps ``image`` to ``logits``.
    losses : Named, callable, or sequence of them
        Each reads fields of the batch and of the model's outputs, and returns one scalar. One that is not `Named` reads
        ``logits`` and ``label``, and returns ``loss``.
    optimizer : Optimizer
        Optimizer of the model's parameters.
    batches : iterable of dict
        A ``DataLoader`` or any iterable of batches ``{"image": (B, C, D, H, W), "label": (B, 1, D, H, W), ...}``. If it
        has ``epoch(number, start=0)``, this yields the epoch's batches from batch ``start`` on, and a training resumed
        within an epoch continues exactly; otherwise the first batches are drawn again and dropped.
    epochs : int
        Length of the training and of the schedule.
    loss_weights : sequence of float, optional
        One factor per loss, 1 by default.
    validation : callable, optional
        Called without arguments, in evaluation mode and with the averaged weights if there are any.
    validate_every : int or None
        Epochs between validations; the last epoch is always validated. None: no validation.
    schedule : callable, optional
        Maps the progress in [0, 1] to a factor of the learning rate, for each optimizer step.
    warmup : float
        Fraction of the training over which the rate rises linearly to its peak.
    precision : str
        ``auto``, ``fp32``, ``bf16`` or ``fp16``; see `Precision`.
    clip : float, optional
        Largest norm of the gradient.
    accumulate : int
        Batches per optimizer step; their gradients are averaged.
    average_decay : float, optional
        Decay of an exponential moving average of the weights, which validations use.
    record : bool
        Record the step as a CUDA graph after a few batches, if possible: on one GPU per process, in bfloat16 or
        float32, with a fused optimizer and a step for each batch. Batches of a third shape run eagerly.
    hooks : Hook, or sequence of them
        Called in this order.

    Attributes
    ----------
    epoch, position : int
        Epochs completed; batches completed in the current one.
    history : list of EpochRecord
    best : EpochRecord or None
    latest_losses : dict
        Losses of a recent batch, for display.
    voxels_per_batch : int or None
        Voxels of the newest batch's images over all processes; None without images.

    Examples
    --------
    >>> from torch.nn import Conv3d, functional as F
    >>> net = Conv3d(1, 2, 3, padding=1)
    >>> batches = [{"image": torch.randn(1, 1, 8, 8, 8), "label": torch.zeros(1, 8, 8, 8).long()}]
    >>> training = Training(
    ...     Named(net, inputs=["image"], outputs=["logits"]),
    ...     Named(F.cross_entropy, inputs=["logits", "label"], outputs=["loss"]),
    ...     torch.optim.SGD(net.parameters(), lr=0.1), batches, epochs=3)
    >>> history = training.run()
    >>> history[-1].losses["loss"] < history[0].losses["loss"]
    True
    """

    def __init__(
        self,
        model: Named | nn.Module,
        losses: Loss | Sequence[Loss],
        optimizer: Optimizer,
        batches: Iterable[Batch] | EpochBatches,
        *,
        epochs: int,
        loss_weights: Sequence[float] | None = None,
        validation: Callable[[], Score] | None = None,
        validate_every: int | None = 1,
        schedule: Callable[[float], float] = constant,
        warmup: float = 0.0,
        precision: str = "auto",
        clip: float | None = None,
        accumulate: int = 1,
        average_decay: float | None = None,
        record: bool = True,
        hooks: Hook | Sequence[Hook] = (),
    ) -> None:
        for name, value in (("epochs", epochs), ("validate_every", validate_every), ("accumulate", accumulate)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        model = Named.wrap(model, ["image"], "logits")
        if not isinstance(model.module, nn.Module):
            raise ConfigError(f"Training needs a Named nn.Module, got a Named {model.title}")
        self.model = model
        self.network: nn.Module = model.module
        self.objective = Objective(losses, loss_weights)
        self.optimizer, self.accumulate = optimizer, accumulate
        self.batches, self.epochs = batches, epochs
        self.validation, self.validate_every = validation, validate_every
        self.hooks = [hooks] if isinstance(hooks, Hook) else list(hooks)
        self.device = next(model.parameters()).device
        self.objective.to(self.device)
        self.precision = Precision.choose(precision, self.device)
        self.step = TrainingStep(
            model,
            self.objective,
            optimizer,
            self.precision,
            clip=clip,
            record=record and accumulate == 1,
            batch_size=getattr(batches, "batch_size", None),
            look=lambda losses: self._losses.require_finite(losses),
        )
        self.average = WeightAverage(self.network, average_decay) if average_decay else None
        self.num_batches = count_batches(batches)
        steps_per_epoch = -(-self.num_batches // accumulate)
        self.schedule = Schedule(optimizer, schedule, steps=epochs * steps_per_epoch, warmup=warmup)

        self.epoch = self.position = 0
        self.history: list[EpochRecord] = []
        self.best: EpochRecord | None = None
        self.latest_losses: dict[str, float] = {}
        self.voxels_per_batch: int | None = None
        self._stop_reason: str | None = None
        self._losses = self._new_losses()
        self._clock = EpochClock()
        self._stopping = Stopping(self.device)

    @property
    def finished(self) -> bool:
        """Whether no epoch is left, or a hook has requested a stop."""
        return self.epoch >= self.epochs or self._stop_reason is not None

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and shows progress."""
        return is_main_process()

    @property
    def seconds_of_epoch(self) -> tuple[float, float]:
        """Seconds of the current epoch over all interruptions, and those of them spent waiting for batches."""
        return self._clock.seconds, self._clock.waited

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradients wait for an optimizer step; a state does not contain them."""
        return self.position % self.accumulate == 0 or self.position >= self.num_batches

    def stop(self, reason: str) -> None:
        """End the training after the current epoch."""
        self._stop_reason = reason

    def run(self) -> list[EpochRecord]:
        """Train until the last epoch, and return the record of every epoch.

        Raises
        ------
        NonFiniteLossError
            If a loss is not finite; the message names epoch, batch and cases.
        KeyboardInterrupt, SystemExit
            After Ctrl-C, SIGTERM or SIGHUP; the hooks have saved the state.
        """
        with self._stopping.catching():
            try:
                self._emit("on_training_begin")
                while not self.finished:
                    self._emit("on_epoch_begin")
                    self._train_epoch()
                    if self._stopping.agree() or not self._close_epoch():
                        self._emit("on_interrupt")
                        self._stopping.agree()  # wait for the leader's save: a launcher ends all when one ends
                        break
                if self._stop_reason and self.is_main_process:
                    logger.info("training stopped after epoch %d: %s", self.epoch, self._stop_reason)
            finally:
                self._end()
        self._stopping.raise_as_signal()
        return self.history

    def _end(self) -> None:
        """Call every hook's ``on_training_end``, also if another one raises."""
        with ExitStack() as ending:
            for hook in reversed(self.hooks):  # the stack runs backwards
                ending.callback(hook.on_training_end, self)
            ending.callback(self.step.release)  # the final validation needs the memory; process groups still exist

    def _train_epoch(self) -> None:
        """Train on the rest of the current epoch; count its seconds and those spent waiting for batches."""
        self.model.train()
        self.step.check_replicas()
        self._stopping.interval.begin()
        self._clock.begin()
        try:
            batches = remaining_batches(self.batches, self.epoch, self.position)
            while True:
                self._report_batch()  # a batch augmented on a GPU is part of a step
                with self._clock.waiting():
                    batch = next(batches, None)
                if batch is None:
                    break
                self._train_batch(to_device(batch, self.device))
                self._stopping.interval.count()
                if self._stopping.interval.is_due and self.is_between_steps and self._look():
                    break
            self._look_at_losses()
        finally:
            self._clock.count()

    def _report_batch(self) -> None:
        """Report the next batch, or the last one if the epoch's batches are done."""
        report_progress("train", self.epoch + 1, min(self.position + 1, self.num_batches))

    def _train_batch(self, batch: Batch) -> None:
        """Forward, loss, backward; an optimizer step when enough batches are gathered."""
        self._report_batch()
        self._emit("on_batch_begin", batch)
        self.step.cases = batch.get("case", ())
        self._losses.begin_batch(self.step.cases)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        completes = (self.position + 1) % self.accumulate == 0 or self.position + 1 == self.num_batches
        try:
            losses = self.step(tensors, gathered=self._group_size(), completes=completes)
        except Exception as fault:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
            cases = ", ".join(map(str, self.step.cases)) or "unknown"
            fault.add_note(f"in epoch {self.epoch + 1}, batch {self.position + 1}, with {shapes}; cases: {cases}")
            raise
        self._losses.add(losses, self.step.gradient_norm if completes else None, self.step.overlap)
        if self.device.type == "cpu":  # on a GPU, reading a value would wait for the device
            self.latest_losses = {name: float(loss) for name, loss in losses.items()}
        samples = self.step.batch_size if self.step.replicated is not None else None
        self.voxels_per_batch = count_voxels(tensors.get("image"), samples)
        self.position += 1
        if completes:
            self.schedule.step()
            if self.average:
                self.average.update()
        self._clock.count()
        self._emit("on_batch_end", {**batch, **losses})

    def _group_size(self) -> int:
        """Return how many batches share the current optimizer step; the last group of an epoch may be smaller."""
        left = self.num_batches - self.position + self.position % self.accumulate
        return min(self.accumulate, left) if left > 0 else self.accumulate  # an iterable may exceed its length

    def _close_epoch(self) -> bool:
        """Validate if due, write the record, call the hooks; return False if a signal stopped the validation.

        The epoch then stays open with all batches completed: a training that resumes there validates first.
        """
        drawn, begin = random_state(), time.perf_counter()
        try:
            outcome = self._validate_epoch()
        except StopRequested:
            restore_random_state(drawn)  # the resumed validation draws the same numbers
            self._stopping.agree()  # passes the signal to processes that did not receive it
            return False
        voxels = self.voxels_per_batch
        record = EpochRecord(
            epoch=self.epoch,
            losses=self._losses.compute_means(),
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            seconds=self._clock.seconds,
            seconds_waited=self._clock.waited,
            score=outcome.score if outcome else None,
            scores=dict(outcome.scores) if outcome else {},
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            batches=self.position,
            seconds_validating=time.perf_counter() - begin if outcome else 0.0,
            voxels_per_second=voxels and voxels * self.position / max(self._clock.seconds, 1e-9),
            gradient_norm=self._losses.compute_mean_norm(),
            soft_dice=self._losses.compute_soft_dice(),
        )
        self.history.append(record)
        self.epoch, self.position = self.epoch + 1, 0
        self._losses, self._clock = self._new_losses(), EpochClock()
        best = -math.inf if self.best is None or self.best.score is None else self.best.score
        if record.score is not None and record.score > best:  # a score of NaN is never the best
            self.best = record
            self._emit("on_best", record)
        self._emit("on_epoch_end", record)
        return True

    def _validate_epoch(self) -> Score | None:
        """Validate if a validation is due after this epoch."""
        every, number = self.validate_every, self.epoch + 1
        if self.validation is None or every is None or (number % every and number < self.epochs):
            return None
        self._emit("on_validation_begin")
        return self.validate(self.validation)

    def validate(self, validation: Callable[[], ScoreT]) -> ScoreT:
        """Call a validation in evaluation mode, with the averaged weights if there are any."""
        report_progress("validate", min(self.epoch + 1, self.epochs))  # the final validation follows the last epoch
        self.model.eval()
        if self.average is None:
            return validation()
        with self.average.applied():
            return validation()

    def _look(self) -> bool:
        """Check the losses so far; return whether a signal arrived, and choose the time of the next check."""
        if self.device.type == "cuda":
            self._look_at_losses()
        return self._stopping.agree(self._stopping.interval.measure())

    def _new_losses(self, losses: Any = (), cases: Any = ()) -> EpochLosses:
        """Return the losses of the current epoch, with the losses and cases of the completed batches."""
        gather = gather_over_processes if self.step.replicated is not None else tuple
        return EpochLosses(self.objective.names, self.epoch, losses, cases, gather)

    def _look_at_losses(self) -> None:
        """Raise if a loss since the last check is not finite; keep the newest losses for display."""
        self.latest_losses = self._losses.look() or self.latest_losses

    def _emit(self, event: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self, *arguments)

    def state(self) -> TrainingState:
        """Return a state from which the training resumes exactly; only the scaler of float16 waits for the device."""
        return TrainingState(
            model=self.network.state_dict(),
            optimizer=self.schedule.optimizer_state(),
            steps_done=self.schedule.steps_done,
            scaler=self.step.scaler.state_dict(),
            average=self.average.state_dict() if self.average else None,
            random=random_state(self.network),
            epoch=self.epoch,
            position=self.position,
            losses=tuple(self._losses.losses),
            cases=tuple(self._losses.cases),
            seconds=self.seconds_of_epoch,
            history=tuple(self.history),
            best=self.best,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return `state` as tensors and plain values."""
        return self.state().as_checkpoint()

    def load_state_dict(self, state: TrainingState | Mapping[str, Any]) -> None:
        """Resume an interrupted training of the same model and epoch length.

        Raises
        ------
        CheckpointError
            If the state is incomplete, or of another network or optimizer.
        """
        state = TrainingState.from_checkpoint(state, "the state to resume from")
        restore(state, self.network, self.optimizer, self.average, self.step.scaler)
        self.schedule.go_to(state.steps_done)
        self.epoch, self.position = state.progress
        losses = [{name: v.to(self.device) for name, v in batch.items()} for batch in state.losses]
        self._losses = self._new_losses(losses, state.cases)
        self._clock = EpochClock(*state.seconds)
        self.history, self.best = [*state.history], state.best
