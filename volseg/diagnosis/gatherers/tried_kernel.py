# mypy: disable-error-code="no-untyped-def"
"""A kernel as small as can be, to see Triton compile."""

import tempfile
from collections.abc import MutableMapping

import torch

from volseg.device.triton_kernels import kernel, tl, triton

__all__ = ["has_gpu", "run_tried_kernel"]

BLOCK = 1024


@kernel()
def add_product(x, y, out, n, block: tl.constexpr):
    """Write ``x * y + x``."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside)
    tl.store(out + at, a * tl.load(y + at, mask=inside) + a, mask=inside)


def has_gpu() -> bool:
    """Tell whether there is a GPU to run it on."""
    return torch.cuda.is_available()


def run_tried_kernel(environment: MutableMapping[str, str]) -> bool:
    """Compile and run the kernel on the first GPU, and compare with torch.

    Parameters
    ----------
    environment
        This process's, in which Triton is given an empty folder to keep what it compiles: what it has compiled before
        would hide that it can compile no more.
    """
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        environment["TRITON_CACHE_DIR"] = folder
        x, y = torch.arange(10_000.0, device="cuda"), torch.full((10_000,), 3.0, device="cuda")
        out = torch.zeros_like(x)
        add_product[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), block=BLOCK)
        return torch.equal(out, 4 * x)
