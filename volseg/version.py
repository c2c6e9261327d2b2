"""Define the version of volseg, and look up those of other packages."""

__version__ = "0.1.0"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # not for --help

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
