# mypy: disable-error-code="no-untyped-def"
"""Compile and run a minimal kernel, to test Triton."""

import os
import tempfile

import torch

from volseg.device.triton_kernels import kernel, tl, triton

BLOCK = 1024
CACHE = "TRITON_CACHE_DIR"


@kernel()
def add_product(x, y, out, n, block: tl.constexpr):
    """Write ``x * y + x``."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    a = tl.load(x + at, mask=inside)
    tl.store(out + at, a * tl.load(y + at, mask=inside) + a, mask=inside)


def has_gpu() -> bool:
    """Return whether there is a GPU."""
    return torch.cuda.is_available()


def run_tried_kernel(device: str = "cuda") -> bool:
    """Compile and run the kernel, and compare with torch."""
    before = os.environ.get(CACHE)
    # Triton's cache would hide a broken compiler.
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        os.environ[CACHE] = folder
        try:
            x, y = torch.arange(10_000.0, device=device), torch.full((10_000,), 3.0, device=device)
            out = torch.zeros_like(x)
            add_product[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), block=BLOCK)
            return torch.equal(out, 4 * x)
        finally:
            del os.environ[CACHE]
            os.environ.update({} if before is None else {CACHE: before})
