"""Refuse a build of torch that has no kernels for the GPUs that the image is for; no GPU is needed.

``python check_torch.py VARIANT`` runs while the image is built: what it finds wrong would else be found on a rented
machine, as "no kernel image is available for execution on the device".
"""

import sys

import torch

NEEDED = {"p3": "sm_70", "current": "sm_90", "cpu": None}
"""The architecture that each variant of the image is for: that of a V100, of an H100, none."""

LAST_CUDNN_OF_VOLTA = 91099
"""cuDNN 9.11 and later have no kernels for sm_70 any more."""


def main() -> None:
    """Check the torch that is installed beside this interpreter."""
    _, variant = sys.argv
    faults = compile_errors(variant, architectures_of(torch), torch.version.cuda, torch.backends.cudnn.version())
    if faults:
        sys.exit(f"torch {torch.__version__} is not for the image {variant}: {'; '.join(faults)}")
    print(f"torch {torch.__version__} for {variant}: CUDA {torch.version.cuda}, {' '.join(architectures_of(torch))}")


def architectures_of(module: object) -> list[str]:
    """Return the GPU architectures that a build of torch has kernels for.

    ``torch.cuda.get_arch_list`` says nothing where there is no GPU; what it would ask does.
    """
    flags = getattr(module._C, "_cuda_getArchFlags", None)  # absent from builds without CUDA
    return [] if flags is None else (flags() or "").split()


def compile_errors(variant: str, architectures: list[str], cuda: str | None, cudnn: int | None) -> list[str]:
    """Return why this torch is of no use in the image."""
    if variant not in NEEDED:
        return [f"there is no such image, only {', '.join(NEEDED)}"]
    needed = NEEDED[variant]
    if needed is None:
        return [] if cuda is None else [f"it is built for CUDA {cuda}, and brings gigabytes that nothing uses"]
    faults = [] if needed in architectures else [f"it has kernels for {architectures}, and {needed} is needed"]
    if variant == "p3" and cudnn is not None and cudnn > LAST_CUDNN_OF_VOLTA:
        faults.append(f"its cuDNN {cudnn} has no kernels for sm_70; 9.10 is the last")
    return faults


if __name__ == "__main__":
    main()
