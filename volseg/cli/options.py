"""Define options and arguments that verbs share, and their shell completion, without importing torch.

typer completes verbs and options, the shell completes files.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
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


def complete_key(incomplete: str) -> list[str]:
    """Return the keys of a config that begin with the typed text, each followed by ``=``."""
    from volseg.config.describing import list_keys, read_schema  # pydantic: only for completion

    return [f"{key}=" for key in list_keys(read_schema()) if key.startswith(incomplete)]


def complete_network(incomplete: str) -> list[str]:
    """Return the networks that come with volseg and begin with the typed text."""
    from volseg.config.describing import list_names, read_schema  # pydantic: only for completion

    return [name for name in list_names(read_schema(), "network") if name.lower().startswith(incomplete.lower())]


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds of components that begin with the typed text."""
    from volseg.config.describing import KINDS, KINDS_OF_FIELDS  # pydantic: only for completion

    kinds = {*KINDS.values(), *KINDS_OF_FIELDS.values(), "reader"}
    return sorted(kind for kind in kinds if kind.startswith(incomplete))


def complete_shipped(incomplete: str) -> list[str]:
    """Return the configs that come with volseg and begin with the typed text."""
    from volseg.config.catalogue import list_shipped  # errors and paths: only for completion

    return [name for name in list_shipped() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Return configs that come with volseg, unless files begin with the typed text; then the shell completes files."""
    typed = Path(incomplete)
    above = typed if incomplete.endswith("/") else typed.parent
    begun = "" if incomplete.endswith("/") else typed.name
    is_there = bool(begun) and above.is_dir() and any(path.name.startswith(begun) for path in above.iterdir())
    return [] if is_there else complete_shipped(incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Return folders of trainings and cross-validations, in the typed folder or in ``runs``."""
    typed = Path(incomplete)
    above = typed if incomplete.endswith("/") else typed.parent
    folders = [*_list_runs(above), *([] if "/" in incomplete else _list_runs(Path("runs")))]
    return sorted({str(folder) for folder in folders if str(folder).startswith(incomplete) or not incomplete})


def _list_runs(folder: Path) -> Iterator[Path]:
    """Yield the subfolders that a training wrote."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / "config.yaml").is_file() or (path / "fold_0").is_dir():
            yield path


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


DATA_SET = check_exists("name the TaskNN_Name folder of an MSD task, or another data set's")

SETTINGS = {
    "--epochs": "training.epochs",
    "--iterations": "training.iterations",
    "--lr": "optimizer.lr",
    "--learning-rate": "optimizer.lr",
    "--batch": "patch.batch",
    "--batch-size": "patch.batch",
    "--patch-size": "patch.size",
    "--fold": "split.fold",
    "--seed": "seed",
}
"""Options that users mistake for values of the config, with the config's keys."""


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
    """Return an argument that names a config; the shell completes names of files and of volseg's own configs."""
    return Argument(metavar="CONFIG", help=about, callback=check_config, autocompletion=complete_config)


def source_argument(metavar: str, about: str, remedy: str) -> Any:
    """Return an argument that names a run or another source; the shell completes names of runs."""
    return Argument(metavar=metavar, help=about, callback=check_exists(remedy), autocompletion=complete_run)


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of verbs."""


class PlainCommand(_PlainFlags, TyperCommand):
    """A verb."""


def verb(
    app: typer.Typer, panel: str | None, example: str, *, cls: type[TyperCommand] = PlainCommand, **settings: Any
) -> Callable[[Any], Any]:
    """Return a decorator that makes a function a verb of the program, in a panel of its help, with an example."""
    return app.command(rich_help_panel=panel, epilog=f"Example: {example}", cls=cls, **settings)


class SuggestingCommand(PlainCommand):
    """A verb that takes a config, and says where a value stands that was given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise for such options before the others are parsed."""
        for argument, following in zip_longest(args, args[1:], fillvalue=""):
            option, given, value = argument.partition("=")
            if option in SETTINGS:
                value = value if given else following
                shown = value if value and not value.startswith("-") else "VALUE"
                raise typer.BadParameter(
                    f"{option} is not an option, but a value of the config: --set {SETTINGS[option]}={shown}"
                )
        return super().parse_args(ctx, args)


ConfigFile = Annotated[Path, config_argument("YAML file of the experiment.")]
Channels = Annotated[int | None, Option(min=1, help="Number of channels, if the data set is absent.")]
Classes = Annotated[int | None, Option(min=2, help="Number of classes with the background, if the data set is absent.")]


def require_data(root: Path) -> None:
    """Refuse a data set that does not exist, before torch is imported.

    A rank of a job leaves this to the ranks together: only some of its machines may see the folder.
    """
    if read_launch() is None:
        DATA_SET(root)


def check_overrides(given: list[str] | None) -> list[str] | None:
    """Raise for a key whose value follows after a space, before the value is parsed as an argument."""
    for assignment in given or ():
        if "=" not in assignment:
            raise typer.BadParameter(f"{assignment} has no value: write --set {assignment}=VALUE, without a space")
    return given


Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        callback=check_overrides,
        help="Override one value, such as training.epochs=5.",
        autocompletion=complete_key,
    ),
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
        "Run folder, cross-validation (its finished folds together), file of `volseg export`, or model folder or "
        "checkpoint of nnU-Net 2; or one fold of these.",
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
        callback=check_overrides,
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
        help="Python file with your own components; it runs first.",
    ),
]
Checkpoint = Annotated[
    str,
    Option(help="latest (the end of the training), best (on the validation cases) or previous (the latest before it)."),
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
