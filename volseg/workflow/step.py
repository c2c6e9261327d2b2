"""What a training does with one batch: forward, loss, backward and, when enough are gathered, the optimizer."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.parallel import RecordedStep
from volseg.workflow.named import Named
from volseg.workflow.objective import Objective
from volseg.workflow.precision import Precision
from volseg.workflow.recorded_step import can_be_recorded

__all__ = ["TrainingStep"]


class TrainingStep:
    """Bring one batch's gradients to the parameters, and the optimizer to the end of its step.

    Parameters
    ----------
    model : Named
        The network.
    objective : Objective
        What is minimised.
    optimizer : Optimizer
        Over the model's parameters.
    precision : Precision
        In which forward and loss are computed.
    clip : float, optional
        Largest norm of the gradient.
    record : bool
        Record the step as a CUDA graph where it can be; every batch must then be a whole step.
    look : callable
        Takes the losses on a CPU, before they reach the weights; it may raise.

    Attributes
    ----------
    scaler : GradScaler
        Of half precision; elsewhere it does nothing.
    recorded : RecordedStep or None
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
        look: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        assert isinstance(model.module, nn.Module)
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.precision = precision
        self.clip = clip
        self.look = look
        self.scaler = precision.scaler()
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
            Whether this batch is the last of them.
        """
        if self.recorded is None:
            return self._run(tensors, gathered, completes)
        assert gathered == 1, "a recorded step is whole"
        return {name: loss.clone() for name, loss in self.recorded(tensors).items()}  # the next replay overwrites them

    def release(self) -> None:
        """Free the recording, if there is one."""
        if self.recorded is not None:
            self.recorded.release()

    def _run(self, tensors: Mapping[str, Tensor], gathered: int = 1, completes: bool = True) -> dict[str, Tensor]:
        losses = self._compute_gradients(tensors, gathered)
        if next(iter(losses.values())).device.type == "cpu":  # looking at them costs nothing there
            self.look(losses)
        if completes:
            if self.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return losses

    def _compute_gradients(self, tensors: Mapping[str, Tensor], gathered: int) -> dict[str, Tensor]:
        """Add the batch's gradients to those that are gathered; return its losses."""
        with self.precision.autocast():
            fields = self.objective({**tensors, **self.model(tensors)})
        self.scaler.scale(fields["loss"] / gathered).backward()
        return {name: fields[name].detach() for name in self.objective.names}
