"""The verbs below `volseg data cache`: list, clear and verify."""

from typing import Annotated

import typer

from volseg.streams import show

__all__ = ["cache_app"]

cache_app = typer.Typer(name="cache", help="Look after the cases that are kept prepared.", no_args_is_help=True)

CacheFolder = Annotated[
    str, typer.Option("--folder", help="The cache; default $VOLSEG_CACHE, else volseg in the user's cache folder.")
]


@cache_app.command("list", epilog="Example: volseg data cache list")
def list_cache(folder: CacheFolder = "auto") -> None:
    """Say which prepared cases are kept, from where, how large they are, and when they were last used."""
    from volseg.data.cache_folder import describe_entries, find_cache_folder  # imports torch: not for --help

    show(describe_entries(find_cache_folder(folder)))


@cache_app.command("clear", epilog="Example: volseg data cache clear --unused 30")
def clear_cache(
    folder: CacheFolder = "auto",
    unused: Annotated[float, typer.Option(min=0, metavar="DAYS", help="Only what was not used for so long.")] = 0,
) -> None:
    """Remove prepared cases; a training that runs keeps those that it has opened."""
    from volseg.data.cache_folder import find_cache_folder, remove_entries  # imports torch: not for --help

    chosen = find_cache_folder(folder)
    removed = [] if chosen is None else remove_entries(chosen, unused_seconds=unused * 86400)
    show(f"removed {len(removed)} case(s), {sum(entry.size for entry in removed) / 2**30:.2f} GiB")


@cache_app.command("verify", epilog="Example: volseg data cache verify")
def verify_cache(folder: CacheFolder = "auto") -> None:
    """Compare every byte that is kept with its checksum, and remove what is damaged: it will be prepared anew."""
    from volseg.data.cache_folder import find_cache_folder, verify_entries  # imports torch: not for --help

    chosen = find_cache_folder(folder)
    found = [] if chosen is None else list(verify_entries(chosen))
    damaged = [fault for _, fault in found if fault is not None]
    for fault in damaged:
        show(f"removed: {fault}")
    show(f"{len(found) - len(damaged)} of {len(found)} case(s) are as they were written")
    if damaged:
        raise typer.Exit(1)
