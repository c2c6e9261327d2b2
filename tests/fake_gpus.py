"""A kind of GPU for tests, and an observer of the kernels that a fake GPU receives."""

from dataclasses import dataclass

from volseg.device import fake_gpu


@dataclass(frozen=True)
class Gpu:
    name: str = "a GPU"
    processors: int = 132
    capability: tuple[int, int] = (9, 0)


class KernelObserver(fake_gpu.GpuObserver):
    """Keeps the kernels."""

    def __init__(self) -> None:
        self.noted: list[fake_gpu.NotedKernel] = []

    def on_kernel(self, kernel: fake_gpu.NotedKernel) -> None:
        self.noted.append(kernel)
