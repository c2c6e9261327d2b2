"""Installed packages, by their metadata: what volseg requires, and whether that holds for all that comes with it."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from volseg.diagnosis.facts import PackageFacts

__all__ = ["find_unmet", "gather"]


def gather() -> PackageFacts:
    """Return versions and conflicts; of volseg used from a checkout, which says nowhere what it requires, neither."""
    if _find_version("volseg") is None:
        return PackageFacts(versions={}, is_installed=False)
    needed = [Requirement(text) for text in distribution("volseg").requires or ()]
    wanted = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    unmet, reached = find_unmet("volseg")
    places: dict[str, set[str]] = {}
    for one in distributions():
        if (name := one.metadata["Name"]) is not None:  # of a broken installation
            places.setdefault(canonicalize_name(name), set()).add(str(one.locate_file("")))
    twice = [
        f"{name} lies in {' and in '.join(sorted(found))}"
        for name, found in sorted(places.items())
        if len(found) > 1 and name in reached
    ]
    return PackageFacts(
        versions={one.name: _find_version(one.name) for one in wanted}, unmet=tuple(unmet), twice=tuple(twice)
    )


def find_unmet(root: str) -> tuple[list[str], set[str]]:
    """Follow the requirements of a package; return those that are not met, and the packages that were reached."""
    unmet: list[str] = []
    waiting: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for requirement in _list_requirements(distribution(name), extras):
            installed = _find_version(requirement.name)
            if installed is None:
                unmet.append(f"{name} needs {requirement.name}{requirement.specifier}, which is not installed")
            elif not requirement.specifier.contains(installed, prereleases=True):
                unmet.append(f"{name} needs {requirement.name}{requirement.specifier}, installed is {installed}")
            if installed is not None:
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return unmet, {name for name, _ in seen}


def _list_requirements(package: Distribution, extras: frozenset[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in package.requires or ()]
    return [
        one
        for one in requirements
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
