"""The verbs about configs themselves: one to begin with, and the schema of all."""

import json
from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_shipped
from volseg.cli.options import Components
from volseg.streams import show

__all__ = ["configs_app"]

configs_app = typer.Typer()


@configs_app.command(
    "init", epilog="Example: volseg init --like task04_unet --data DIR/Task04_Hippocampus -o mine.yaml"
)
def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")] = Path(
        "experiment.yaml"
    ),
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The data set to train on.")] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take the values of a config that comes with volseg: task04_unet, ...",
            autocompletion=complete_shipped,
        ),
    ] = None,
    minimal: Annotated[bool, typer.Option("--minimal", help="Only what differs from the defaults.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a config to begin with, in which every value says what it means and what it may be."""
    from volseg.commands import spell  # what follows imports torch: not for --help
    from volseg.experiment.starting_config import init_config

    config = init_config(output, data=data, like=like, minimal=minimal, overwrite=overwrite)
    ways = (
        [] if config.data.root.exists() else ["set data.root in it to your data set, or --set data.root=FOLDER below"]
    )
    show("\n  ".join([f"{output} is written. Next:", *ways, spell(f"volseg train {output}")]))


@configs_app.command("schema", epilog="Example: volseg schema > volseg.schema.json")
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Written anew; default: print it.")
    ] = None,
    components: Components = None,
) -> None:
    """Print the JSON schema of configs, by which editors complete and check them."""
    from volseg.experiment import load_components  # imports torch: not for --help
    from volseg.experiment.starting_config import config_schema, write_schema

    load_components(components or ())
    if output is not None:
        write_schema(output)
    else:
        show(json.dumps(config_schema(), indent=1))
