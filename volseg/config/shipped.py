"""Find the configs that come with volseg, in an installation or a source tree."""

from pathlib import Path

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError


def list_shipped() -> dict[str, Path]:
    """Return the file of each config by name: ``quickstart``, ``task04_cpu``, ``msd/task09_spleen`` ..."""
    installed = Path(__file__).parents[1] / "configs"
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "configs"
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def shipped_config_path(name: str) -> Path:
    """Return the file of a config that comes with volseg.

    Raises
    ------
    ConfigError
        If no config has the name.

    Examples
    --------
    >>> shipped_config_path("quickstart").name
    'quickstart.yaml'
    """
    known = list_shipped()
    if name not in known:
        raise ConfigError(f"no config called {name!r} comes with volseg; {did_you_mean(name, known)}")
    return known[name]
