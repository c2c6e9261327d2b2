"""Register the user's components: by a call, or by a file on the command line.

One table lists the kinds. A config never names files of code: only the command line does.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from volseg.config.nearest import did_you_mean
from volseg.config.registry import EXECUTED, Registry, Source
from volseg.data.readers import SUFFIXES
from volseg.errors import ConfigError, VolsegError
from volseg.models.networks import NETWORKS
from volseg.monitoring.loggers import LOGGERS
from volseg.transforms.augmentation.own import AUGMENTATIONS
from volseg.transforms.preprocessing import PREPROCESSING
from volseg.workflow.components import LOSSES, METRICS, OPTIMIZERS
from volseg.workflow.hooks import HOOKS
from volseg.workflow.schedules import SCHEDULES

Component = TypeVar("Component", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

REGISTRIES: Mapping[str, Registry] = {
    "network": NETWORKS,
    "loss": LOSSES,
    "transform": PREPROCESSING,
    "augmentation": AUGMENTATIONS,
    "metric": METRICS,
    "hook": HOOKS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "reader": SUFFIXES,
    "logger": LOGGERS,
}
"""The kinds of component, and the registry of each."""

_files: dict[Path, Source] = {}
"""Files that this process has run, in order; its child processes run them too."""

_contents: dict[str, bytes] = {}
"""Content of these files, by its sha256: the files may be edited meanwhile."""

_running: list[Source] = []
"""The running file, to which a registration belongs."""


@overload
def register(kind: str, name: str) -> Callable[[Component], Component]: ...


@overload
def register(kind: str, name: str, component: Component) -> Component: ...


def register(kind: str, name: str, component: Component | None = None) -> Any:
    """Let configs name a component of the user; as a call, or as a decorator.

    Parameters
    ----------
    kind : str
        ``network``, ``loss``, ``transform``, ``augmentation``, ``metric``, ``hook``, ``optimizer``, ``schedule``,
        ``reader`` or ``logger``.
    name : str
        Name in configs; for a reader the suffix of its files. Unique among the components of the kind.
    component : callable, optional
        Class or function that makes the component from the parameters in the config; docs/own-components.md lists the
        arguments of each kind. Without it, a decorator is returned.

    Returns
    -------
    callable
        The component, unchanged.

    Raises
    ------
    ConfigError
        For an unknown kind, or a name that is taken.

    Examples
    --------
    >>> import volseg
    >>> @volseg.register("schedule", "half")
    ... def half(progress):
    ...     return 0.5
    >>> volseg.experiment.REGISTRIES["schedule"].forget("half")
    """
    if kind not in REGISTRIES:
        raise ConfigError(f"volseg.register expects one of {', '.join(REGISTRIES)}; {did_you_mean(kind, REGISTRIES)}")
    if component is None:
        return lambda decorated: register(kind, name, decorated)
    if kind == "reader" and not (name.startswith(".") and name == name.lower()):
        raise ConfigError(f"a reader's name must be the suffix of its files in lower case, such as .npz, got {name!r}")
    REGISTRIES[kind].register(name, component, _running[-1] if _running else None)
    return component


def load_components(files: str | Path | Sequence[str | Path]) -> None:
    """Run Python files that register components, each once per process.

    Parameters
    ----------
    files : sequence of path
        Each file is self-contained: it imports only installed packages, as the run does not record other files.

    Raises
    ------
    ConfigError
        If a file cannot be read or run, or has changed since this process ran it; names the line.
    """
    for path in map(Path, [files] if isinstance(files, str | Path) else files):
        try:
            content = path.read_bytes()
        except OSError as fault:
            raise ConfigError(f"--components {path} cannot be read: {fault.strerror}; name a Python file") from fault
        source = Source(file=str(path.resolve()), sha256=hashlib.sha256(content).hexdigest())
        known = _files.get(path.resolve())
        if known is None:
            _run_as(source, path, content)
            _files[path.resolve()] = source
            _contents[source.sha256 or ""] = content
        elif known != source:
            raise ConfigError(f"{path} was changed after this process had run it; start a new process")


def load_content(source: Source) -> bytes:
    """Return the bytes of a file that this process has run."""
    return _contents[source.sha256 or ""]


def components_arguments() -> list[str]:
    """Return the options that load the same components in a child process.

    Raises
    ------
    ConfigError
        If a component was registered by a plain call, which another process does not see.
    """
    for kind, registry in REGISTRIES.items():
        for name in sorted(registry.registered):
            source = registry.get_source(name)
            if source is not None and source.module is not None:
                raise ConfigError(
                    f"{kind} {name!r} was registered by {source}, which the processes of this job do not run; "
                    "put it into a file, and load that with --components FILE or volseg.load_components"
                )
    return [argument for path in _files for argument in ("--components", str(path))]


def list_components(kind: str | None = None) -> list[str]:
    """Return a line for each component that a config may name: its kind, its name, and its source.

    Raises
    ------
    ConfigError
        For an unknown kind.
    """
    if kind is not None and kind not in REGISTRIES:
        raise ConfigError(f"unknown kind of component {kind!r}; {did_you_mean(kind, REGISTRIES)}")
    return [
        f"{one:<13} {name:<32} {registry.get_source(name) or 'built in'}"
        for one, registry in REGISTRIES.items()
        if kind in (None, one)
        for name in registry
    ]


def _run_as(source: Source, path: Path, content: bytes) -> None:
    """Run a file whose registrations come from ``source``; if it fails, restore the registries."""
    before = {kind: registry.registered for kind, registry in REGISTRIES.items()}
    _running.append(source)
    try:
        _run(path, content)
    except BaseException:
        for kind, registry in REGISTRIES.items():
            for name in registry.registered - before[kind]:
                registry.forget(name)
        raise
    finally:
        _running.pop()


def _run(path: Path, content: bytes) -> None:
    """Run a file's content as a separate module, which pickles and tracebacks can name.

    The content is executed, not imported: an import may use a stale cache, but the recorded checksum must be that of
    the executed bytes.
    """
    module = ModuleType(f"volseg_components_{hashlib.sha256(content).hexdigest()[:12]}")
    module.__file__ = str(path)
    setattr(module, EXECUTED, content)
    sys.modules[module.__name__] = module
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)  # noqa: S102 - the command line names the file
    except VolsegError as fault:
        raise ConfigError(f"--components {path}{_line_of(fault, path)}: {fault}") from fault
    except Exception as fault:  # any error of the user's code
        told = f"--components {path} cannot be run{_line_of(fault, path)}"
        raise ConfigError(f"{told}: {type(fault).__name__}: {fault}") from fault


def _line_of(fault: BaseException, path: Path) -> str:
    """Return the last line of the file that led to a fault."""
    if isinstance(fault, SyntaxError):
        return f", line {fault.lineno}"
    line, frame = None, fault.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == str(path) else line
        frame = frame.tb_next
    return f", line {line}" if line else ""
