"""Components by name: what a config may call, and nothing else.

A component in a config is ``{name: VNet, dropout_prob: 0.1}``: a name looked up in a table, and parameters checked
against the component's own signature. A dotted path is never imported and no text is ever evaluated, so a config from
a stranger can at most build what these tables hold.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError

__all__ = ["Registry"]


class Registry(Mapping[str, Callable[..., Any]]):
    """A table of components of one kind.

    Parameters
    ----------
    kind : str
        What the components are, for messages: ``"network"``, ``"loss"``.
    components : mapping, optional
        Name to class or function.

    Examples
    --------
    >>> shapes = Registry("shape", {"Ball": dict})
    >>> shapes.build({"name": "Ball", "radius": 3})
    {'radius': 3}
    >>> shapes.build({"name": "Bell"})
    Traceback (most recent call last):
    volseg.errors.ConfigError: no shape is called 'Bell'; did you mean 'Ball'?
    """

    def __init__(self, kind: str, components: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.kind = kind
        self._components = dict(components or {})

    def __getitem__(self, name: str) -> Callable[..., Any]:
        try:
            return self._components[name]
        except KeyError:
            raise ConfigError(f"no {self.kind} is called {name!r}; {did_you_mean(name, self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._components))

    def __len__(self) -> int:
        return len(self._components)

    def __contains__(self, name: object) -> bool:
        return name in self._components

    def register(self, name: str, component: Callable[..., Any]) -> None:
        """Add a component of the user's own; a name is given once."""
        if name in self._components:
            raise ConfigError(f"a {self.kind} called {name!r} exists already; choose another name")
        self._components[name] = component

    def accepts(self, name: str, parameter: str) -> bool:
        """Tell whether component ``name`` takes ``parameter`` by keyword."""
        names, open_ended = _keywords(self[name])
        return open_ended or parameter in names

    def check(self, spec: Mapping[str, Any]) -> None:
        """Raise unless ``spec`` names a component and parameters that it takes.

        Raises
        ------
        ConfigError
            With the nearest known names.
        """
        if "name" not in spec:
            raise ConfigError(f"a {self.kind} needs a name, got {dict(spec)!r}; known: {', '.join(self)}")
        names, open_ended = _keywords(self[spec["name"]])
        for parameter in spec:
            if parameter != "name" and not open_ended and parameter not in names:
                hint = did_you_mean(parameter, names)
                raise ConfigError(f"{self.kind} {spec['name']} has no parameter {parameter!r}; {hint}")

    def build(self, spec: Mapping[str, Any], *args: Any, **fixed: Any) -> Any:
        """Call the component that ``spec`` names with its parameters.

        Parameters
        ----------
        spec : mapping
            ``name`` and the component's own parameters.
        *args, **fixed
            What the program supplies; a spec that sets one of ``fixed`` is refused.

        Raises
        ------
        ConfigError
            For an unknown name or parameter, or parameters that the component refuses.
        """
        self.check(spec)
        parameters = {key: value for key, value in spec.items() if key != "name"}
        if clash := sorted(parameters.keys() & fixed.keys()):
            raise ConfigError(f"{self.kind} {spec['name']}: {clash} follow from the data and cannot be set")
        try:
            return self[spec["name"]](*args, **parameters, **fixed)
        except (TypeError, ValueError) as fault:
            raise ConfigError(f"{self.kind} {spec['name']} refused {parameters}: {fault}") from fault

    def bind(self, spec: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the component with the spec's parameters bound, to be called later."""
        self.check(spec)
        parameters = {key: value for key, value in spec.items() if key != "name"}
        return partial(self[spec["name"]], **parameters)


def _keywords(component: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keywords a component takes, and whether it takes any other."""
    try:
        parameters = inspect.signature(component).parameters.values()
    except ValueError:  # some builtins have no signature
        return set(), True
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
