"""The version of volseg, and those of other packages."""

__version__ = "0.1.0"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # not for --help

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
