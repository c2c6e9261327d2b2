"""Define options and arguments that verbs share, without importing torch.

typer completes verbs and options in a shell; the shell completes file names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from volseg import experiment
from volseg.config.nearest import suggest_path
from volseg.errors import ConfigError
from volseg.launched import read_launch
from volseg.monitoring.console import add_to_logs


def check_config(path: Path | None) -> Path | None:
    """Raise if a config or data set does not exist, before torch is imported."""
    from volseg.config.catalogue import list_shipped  # errors and paths: not for --help

    if path is not None and not path.exists() and str(path) not in list_shipped():
        from volseg.config.loading import load_config  # pydantic: only before an error

        load_config(path)  # raises, and lists the known configs and folders
    return path


def check_exists(remedy: str) -> Callable[[Any], Any]:
    """Return a callback that raises for a missing path, with the nearest existing name, before torch is imported."""

    def check(given: Path | Sequence[Path] | None) -> Path | Sequence[Path] | None:
        for path in [given] if isinstance(given, Path) else given or ():
            if not path.exists():
                raise ConfigError(f"{path} does not exist; {remedy}{suggest_path(path)}")
        return given

    return check


DATA_SET = check_exists("name the TaskNN_Name folder of an MSD task, or the folder of another data set")


class _PlainFlags:
    """Help that shows flags without ``<bool>``: a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        params = super().get_params(ctx)  # type: ignore[misc]  # of the class that this one is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


def config_argument(about: str) -> Any:
    """Return an argument that names a config."""
    return Argument(metavar="CONFIG", help=about, callback=check_config)


def source_argument(metavar: str, about: str, remedy: str) -> Any:
    """Return an argument that names a run or another source."""
    return Argument(metavar=metavar, help=about, callback=check_exists(remedy))


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of verbs."""


class PlainCommand(_PlainFlags, TyperCommand):
    """A verb."""


def verb(app: typer.Typer, panel: str | None, example: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that makes a function a verb of the program, in a panel of its help, with an example."""
    return app.command(rich_help_panel=panel, epilog=f"Example: {example}", cls=PlainCommand, **settings)


ConfigFile = Annotated[Path, config_argument("YAML file of the experiment.")]
Channels = Annotated[int | None, Option(min=1, help="Number of channels, if the data set is absent.")]
Classes = Annotated[int | None, Option(min=2, help="Number of classes with the background, if the data set is absent.")]


def require_data(root: Path) -> None:
    """Refuse a data set that does not exist, before torch is imported.

    The ranks of a job check it together later: only some of its machines may see the folder.
    """
    if read_launch() is None:
        DATA_SET(root)


Overrides = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override one value, such as training.epochs=5.")
]


def gather_overrides(given: Sequence[str] | None, output: Path | None, *, no_cache: bool) -> list[str]:
    """Return the overrides of a verb, including those of its options ``--output`` and ``--no-cache``."""
    from volseg.config.loading import path_override  # pydantic: not for --help

    folder = [path_override("output", output)] if output else []
    return [*(given or ()), *folder, *(["data.cache=none"] if no_cache else [])]


Source = Annotated[
    Path,
    source_argument(
        "SOURCE",
        "Run folder, cross-validation (an ensemble of its finished folds), file of `volseg export`, or model folder "
        "or checkpoint of nnU-Net 2; or one fold of these.",
        "name a run folder of volseg train, the folder of a cross-validation, a file of volseg export, a model "
        "folder of nnU-Net 2, or a file of weights",
    ),
]
MadeFolder = Annotated[
    Path,
    source_argument(
        "RUN|CV",
        "Folder of `volseg train` or `volseg cross-validate`.",
        "name the folder that `volseg train` or `volseg cross-validate` wrote",
    ),
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the run's config, such as device=cpu, inference.mirror=true or data.root=DIR.",
    ),
]
Output = partial(Option, "--output", "-o")
NoCache = Annotated[bool, Option("--no-cache", help="Prepare all cases again and cache none: data.cache=none.")]


def _load_components(context: typer.Context, files: list[Path] | None) -> list[Path] | None:
    """Run the files before the verb, and import the training code only if there are any. Shell completion runs none."""
    if files and not context.resilient_parsing:
        experiment.load_components(files)
    return files


Components = Annotated[
    list[Path] | None,
    Option(
        "--components",
        metavar="FILE",
        callback=_load_components,
        help="Python file that defines your own components; it runs first.",
    ),
]
Checkpoint = Annotated[
    str, Option(help="latest, best (highest score on the validation cases) or previous (the one before latest).")
]


def _take(form: Literal["json", "quiet"]) -> Callable[[bool], bool]:
    """Return a callback that sets up the logs for an option, before the verb runs."""

    def set_up(wanted: bool) -> bool:
        if wanted:
            add_to_logs(form)
        return wanted

    return set_up


JsonLogs = Annotated[
    bool,
    Option(
        "--json-logs",
        callback=_take("json"),
        help="Write a JSON object for each line and epoch to standard error; for all commands: VOLSEG_LOGS=json.",
    ),
]
Quiet = Annotated[
    bool, Option("--quiet", callback=_take("quiet"), help="Show only warnings and errors; or VOLSEG_LOGS=quiet.")
]
