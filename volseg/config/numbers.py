"""Numbers that a config may hold."""

from typing import Annotated

from pydantic import Field

__all__ = [
    "ClassWeight",
    "Count",
    "Decay",
    "Finite",
    "Fraction",
    "NonNegative",
    "Positive",
    "Seed",
    "Sides",
    "Tolerance",
]

Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Sides = tuple[Count, Count, Count]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What Python's, NumPy's and torch's generators all take."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
ClassWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
