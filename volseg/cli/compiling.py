"""The verb that compiles a training's kernels before there is a GPU: for an image, or a shared cache."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_config
from volseg.cli.options import Components, Overrides, SuggestingCommand
from volseg.streams import show

__all__ = ["compiling_app"]

compiling_app = typer.Typer()


@compiling_app.command(
    "compile", cls=SuggestingCommand, epilog="Example: volseg compile configs/task04_unet.yaml --gpu h200"
)
def compile_(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file of the experiment.", autocompletion=complete_config),
    ],
    gpu: Annotated[str, typer.Option(metavar="KIND", help="What will train, such as h200; it need not be here.")],
    overrides: Overrides = None,
    channels: Annotated[int | None, typer.Option(min=1, help="Of the images, where the data set is not there.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="Of the label maps, with the background, where the data set is not there.")
    ] = None,
    components: Components = None,
) -> None:
    """Compile the kernels of a training on one GPU, without one, into Triton's cache: it then begins at once.

    The cache is the folder TRITON_CACHE_DIR. Versions and config must be those of the training, but for data and name.
    """
    from volseg import experiment  # imports torch: not for --help
    from volseg.forecast.gpu_kinds import find_kind

    experiment.load_components(components or ())
    loaded = experiment.load_config(config, overrides or ())
    compiled = experiment.compile_beforehand(loaded, find_kind(gpu), channels=channels, classes=classes)
    show(f"{compiled.kernels} kernels of {loaded.name} are compiled for {find_kind(gpu).name}")


@compiling_app.command(hidden=True)
def compile_kernels(components: Components = None) -> None:
    """Compile the kernels of the training that started this process, while that reads its cases."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    experiment.serve_kernels()
