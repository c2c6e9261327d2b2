"""Bind the inputs and outputs of modules to named fields of a batch.

A batch is a dict of fields. ``Named`` binds a module's arguments and results to fields by name, so that models, losses
and metrics of any library can be combined without glue: the order of the fields in a batch never matters.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from volseg.errors import BatchFieldError, ConfigError


class Named(nn.Module):
    """A module with named inputs and outputs.

    Parameters
    ----------
    module : nn.Module or callable
        A network, loss or metric. It is called with positional arguments.
    inputs : sequence of str
        Fields of the batch, in the order of the module's arguments.
    outputs : sequence of str
        Names of the results, in the order in which the module returns them. A single name takes the result unchanged (a
        list of deep-supervision heads stays a list); several names unpack a tuple or list.

    Examples
    --------
    >>> import torch
    >>> double = Named(lambda x: 2 * x, inputs=["image"], outputs=["logits"])
    >>> double({"image": torch.ones(1), "label": torch.zeros(1)})
    {'logits': tensor([2.])}
    """

    def __init__(self, module: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        for kind, names in (("inputs", inputs), ("outputs", outputs)):
            if isinstance(names, str) or not names or len(set(names)) != len(names):
                raise ConfigError(f"{kind} must be a list of different field names, got {names!r}")
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @classmethod
    def wrap(cls, module: Callable[..., Any], inputs: Sequence[str], output: str) -> "Named":
        """Return ``module`` if it is a `Named`, else a `Named` with the conventional fields.

        Raises
        ------
        ConfigError
            If the module cannot be called, or its parameters name the same fields in another order.
        """
        if isinstance(module, Named):
            return module
        if not callable(module) or isinstance(module, type):
            raise ConfigError(
                f"needed: a module that takes {', '.join(inputs)} and gives {output}, or "
                f"Named(module, inputs=[...], outputs=[...]); got {module!r}"
            )
        _require_order(module, inputs)
        return cls(module, inputs, [output])

    @property
    def title(self) -> str:
        """The wrapped module's own name, for messages."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``inputs`` from the batch in their declared order; return ``outputs`` by name.

        Raises
        ------
        BatchFieldError
            If the batch lacks an input, or the number of results differs from the number of outputs.
        """
        if missing := [name for name in self.inputs if name not in batch]:
            raise BatchFieldError(
                f"{self.title} needs {missing}, but the batch has {sorted(batch)}; "
                "rename the field where the batch is made, or the input of this Named"
            )
        results = self.module(*(batch[name] for name in self.inputs))
        if len(self.outputs) == 1:
            return {self.outputs[0]: results}
        count = len(results) if isinstance(results, tuple | list) else 1
        if count != len(self.outputs):
            raise BatchFieldError(
                f"{self.title} returned {count} result(s), but {len(self.outputs)} are named: {list(self.outputs)}"
            )
        return dict(zip(self.outputs, results, strict=True))

    def extra_repr(self) -> str:
        """Show the fields in the module's printout."""
        return f"{list(self.inputs)} -> {list(self.outputs)}"


def _require_order(module: Callable[..., Any], inputs: Sequence[str]) -> None:
    """Raise if a module's parameters have the fields' names in another order: it would get the wrong inputs.

    ``loss(label, logits)`` often computes a plausible but wrong number from exchanged inputs.
    """
    try:
        parameters = inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    places = {name: named.index(name) for name in inputs if name in named}
    if wrong := [name for place, name in enumerate(inputs) if places.get(name, place) != place]:
        raise ConfigError(
            f"{getattr(module, '__name__', type(module).__name__)} is called with {', '.join(inputs)} in this order, "
            f"and its parameters are ({', '.join(named)}), where {wrong[0]} stands elsewhere; say what each gets by "
            "Named(module, inputs=[...], outputs=[...])"
        )
