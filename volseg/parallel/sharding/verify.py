"""The old place of what compares a network with itself on several devices."""

from volseg.parallel.sharding import moved

__getattr__ = moved(
    __name__,
    {
        "Report": "volseg.parallel",
        "verify": "volseg.parallel",
        "TOLERANCE": "volseg.parallel.verification.verify",
        "compare": "volseg.parallel.verification.comparison",
        "default_objective": "volseg.parallel.verification.comparison",
    },
)
