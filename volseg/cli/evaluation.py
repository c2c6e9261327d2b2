"""The verbs that judge predictions: evaluate and compare."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.streams import show

__all__ = ["evaluation_app"]

evaluation_app = typer.Typer()


@evaluation_app.command(
    epilog="Example: volseg evaluate --predictions predictions --labels Task04_Hippocampus/labelsTr --allow-missing"
)
def evaluate(
    predictions: Annotated[Path, typer.Option(metavar="DIR", help="A label map for each case, of whatever program.")],
    labels: Annotated[Path, typer.Option(metavar="DIR", help="The true label maps; or a data set.")],
    names: Annotated[
        str | None,
        typer.Option(help="A dataset.json, or 1=liver,2=tumour; default the data set's, else the values found."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="What the table shows: dice, nsd, hd95, assd ...; again for each.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, metavar="MM", help="Of NSD; default the public task's of that name.")
    ] = None,
    lesions: Annotated[
        list[str] | None, typer.Option(metavar="LABEL", help="A label whose lesions are counted; again for each.")
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Leave cases out that nobody predicted.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="For summary.json and cases.csv; default among the predictions."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json in place of the table.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace these files if they are there.")] = False,
) -> None:
    """Score label maps per case and label on their own grid. Exit status 1 if a case could not be scored."""
    from volseg.evaluation import judging  # imports torch: not for --help

    evaluated = judging.judge_folders(
        predictions,
        labels,
        names=names,
        metrics=metrics,
        tolerance=tolerance,
        lesions=lesions or (),
        allow_missing=allow_missing,
        output=output or predictions,
        overwrite=overwrite,
    )
    show(judging.judging_json(evaluated) if as_json else judging.judging_words(evaluated, metrics))
    if evaluated.faults:
        raise typer.Exit(1)


@evaluation_app.command(epilog="Example: volseg compare runs/unet runs/resenc -o unet_or_resenc")
def compare(
    methods: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Runs, cross-validations, or predictions that were evaluated."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="For CSV, JSON and picture.")] = Path(
        "comparison"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Compare methods case by case: mean difference with its interval, wins and losses, Wilcoxon's test."""
    from volseg.evaluation import judging  # imports torch: not for --help

    show(judging.compare_folders(methods, output, overwrite=overwrite))
