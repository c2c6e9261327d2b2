"""Look up components by name; a config can use only these.

A component in a config is ``{name: VNet, dropout_prob: 0.1}``: a name for a table lookup, and parameters that are
checked against the component's signature. Dotted paths are never imported, and no text is evaluated. So a config from
an untrusted source can build only built-in components, and those that the program registered.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError, DataError, VolsegError

Record = TypeVar("Record")

EXACT = ConfigDict(extra="forbid", strict=True)
"""A plain `TypeAdapter` of a dataclass accepts ``"3"`` as a number, and ignores unknown fields."""


def read_record(kind: type[Record], content: Any) -> Record:
    """Return a dataclass built from parsed JSON, nested dataclasses included.

    Raises
    ------
    ValueError
        If ``content`` does not fit; the message has one line.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Patch:
    ...     size: tuple[int, ...]
    >>> read_record(Patch, {"size": [32, 32, 16]})
    Patch(size=(32, 32, 16))
    >>> read_record(Patch, {"size": [32, "32", 16]})
    Traceback (most recent call last):
    ...
    ValueError: size.1: Input should be a valid integer, got '32'
    """
    # A dataclass inherits the settings of the type around it; pydantic refuses settings for the dataclass itself.
    # Strict mode accepts a list for a tuple, and an object for a dataclass, only in JSON text.
    known = TypeAdapter(tuple[kind], config=EXACT)  # type: ignore[valid-type]
    try:
        (found,) = known.validate_json(json.dumps([content]))
    except ValidationError as fault:
        errors = fault.errors(include_url=False)
        places = [".".join(map(str, error["loc"][1:])) or kind.__name__ for error in errors]
        told = (f"{place}: {error['msg']}, got {error['input']!r}" for place, error in zip(places, errors, strict=True))
        raise ValueError("; ".join(told)) from None
    return found


EXECUTED = "__volseg_executed__"
"""Attribute of a module that was executed from bytes: these bytes, since the file may change later."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a component: a file of ``--components``, or a call of ``volseg.register``."""

    file: str | None = None
    """Path of the file of ``--components``."""
    sha256: str | None = None
    """SHA-256 of the file's bytes when it was executed."""
    module: str | None = None
    """Module of the program that registered the component."""

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.file}, sha256 {(self.sha256 or '')[:12]}"
        return f"a call of volseg.register in {self.module}"

    def as_json(self) -> dict[str, str]:
        """Return the known fields as plain values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Any, file: object) -> "Source":
        """Return the source that `as_json` wrote.

        Raises
        ------
        DataError
            If ``content`` is something else; names ``file``.
        """
        try:
            return read_record(cls, content)
        except ValueError as fault:
            raise DataError(f"{file} should name each component's source ({fault}); restore the file") from fault


class Registry(Mapping[str, Callable[..., Any]]):
    """A table of components of one kind.

    Parameters
    ----------
    kind : str
        Noun for messages: ``"network"``, ``"loss"``.
    components : mapping, optional
        Name to class or function.

    Examples
    --------
    >>> shapes = Registry("shape", {"Ball": dict})
    >>> shapes.build({"name": "Ball", "radius": 3})
    {'radius': 3}
    >>> shapes.build({"name": "Bell"})
    Traceback (most recent call last):
    volseg.errors.ConfigError: no shape is called 'Bell'; did you mean 'Ball'? (add your own ...)
    """

    def __init__(self, kind: str, components: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.kind = kind
        self._components = dict(components or {})
        self._sources: dict[str, Source] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name in self._components:
            return self._components[name]
        hint = f"{did_you_mean(name, self)} (add your own with --components FILE or volseg.register)"
        raise ConfigError(f"no {self.kind} is called {name!r}; {hint}")

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._components))

    def __len__(self) -> int:
        return len(self._components)

    def __contains__(self, name: object) -> bool:
        return name in self._components

    def register(self, name: str, component: Callable[..., Any], source: Source | None = None) -> None:
        """Add a custom component under an unused name."""
        if not (isinstance(name, str) and name and callable(component)):
            raise ConfigError(f"a {self.kind} needs a name and a class or function, got {name!r} and {component!r}")
        if name in self:
            raise ConfigError(
                f"a {self.kind} called {name!r} already exists ({self.get_source(name) or 'built in'}); "
                "choose another name"
            )
        self._components[name] = component
        self._sources[name] = source or Source(module=component.__module__)

    @property
    def registered(self) -> frozenset[str]:
        """Names of the components that were registered in this process."""
        return frozenset(self._sources)

    def forget(self, name: str) -> None:
        """Remove a registered component."""
        del self._sources[name]
        del self._components[name]

    def get_source(self, name: str) -> Source | None:
        """Return the origin of a custom component; None for a built-in component."""
        return self._sources.get(name)

    def accepts(self, name: str, parameter: str) -> bool:
        """Return whether component ``name`` accepts ``parameter`` as a keyword."""
        names, open_ended = _keywords(self[name])
        return open_ended or parameter in names

    def check(self, spec: Mapping[str, Any]) -> None:
        """Raise if ``spec`` names an unknown component or parameter.

        Raises
        ------
        ConfigError
            Names the nearest known names.
        """
        if "name" not in spec:
            raise ConfigError(f"a {self.kind} needs a name, got {dict(spec)!r}; known: {', '.join(self)}")
        names, open_ended = _keywords(self[spec["name"]])
        for parameter in spec:
            if parameter != "name" and not open_ended and parameter not in names:
                hint = did_you_mean(parameter, names)
                raise ConfigError(f"{self.kind} {spec['name']} has no parameter {parameter!r}; {hint}")

    def build(self, spec: Mapping[str, Any], *args: Any, **fixed: Any) -> Any:
        """Call the component of ``spec`` with its parameters, and return the result.

        Parameters
        ----------
        spec : mapping
            ``name`` and the component's own parameters.
        *args, **fixed
            Arguments from the program; a spec must not set any of ``fixed``.

        Raises
        ------
        ConfigError
            If a name or parameter is unknown, or the component refuses the parameters.
        """
        self.check(spec)
        parameters = {key: value for key, value in spec.items() if key != "name"}
        if clash := sorted(parameters.keys() & fixed.keys()):
            raise ConfigError(f"{self.kind} {spec['name']}: {clash} follow from the data and cannot be set")
        try:
            return self[spec["name"]](*args, **parameters, **fixed)
        except ImportError as fault:  # of a package that only this component needs
            raise ConfigError(f"{self.kind} {spec['name']} {explain_import(fault)}") from fault
        except Exception as fault:  # the component's code may raise anything
            if isinstance(fault, VolsegError) and not isinstance(fault, ValueError):
                raise
            refused = f" refused {parameters}" if parameters else ""
            raise ConfigError(f"{self.kind} {spec['name']}{refused}: {fault}") from fault

    def bind(self, spec: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the component with the spec's parameters bound."""
        self.check(spec)
        parameters = {key: value for key, value in spec.items() if key != "name"}
        return partial(self[spec["name"]], **parameters)


def explain_import(fault: ImportError) -> str:
    """Return the end of an error message on a failed import: the missing package and how to install it."""
    # MONAI's optional imports have the name only in their message: "import einops (No module named 'einops')."
    named = re.search(r"No module named '([\w.]+)'", str(fault))
    module = fault.name or (named.group(1) if named else None)
    remedy = f"install it: pip install {module.partition('.')[0]}" if module else "install that package"
    return f"needs a package that cannot be imported ({str(fault).strip().partition(chr(10))[0]}); {remedy}"


def _keywords(component: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keywords of a component, and whether it accepts any other keyword."""
    try:
        parameters = inspect.signature(component).parameters.values()
    except ValueError:  # some builtins have no signature
        return set(), True
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
