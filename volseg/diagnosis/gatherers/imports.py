"""Whether the libraries that read and write images can be imported, which their metadata does not tell."""

from importlib import import_module

from volseg.diagnosis.facts import ImportFacts

__all__ = ["LIBRARIES", "gather"]

LIBRARIES = ("numpy", "scipy.ndimage", "nibabel", "SimpleITK", "isal", "tensorboard", "monai")


def gather(libraries: tuple[str, ...] = LIBRARIES) -> ImportFacts:
    """Import one after the other; a library is C and Fortran that may lack a file of the system."""
    refused = {}
    for name in libraries:
        try:
            import_module(name)
        except Exception as fault:  # whatever others' code raises is what is asked for
            refused[name] = f"{type(fault).__name__}: {fault}".strip().splitlines()[0]
    return ImportFacts(refused=refused)
