"""Compile the kernels of configs for several GPUs, then launch them as far as possible without one.

python tests/device/compile_and_launch.py CONFIG ... --capability 8 0 --capability 9 0

A process of its own: Triton's current device is taken by `take_capability`, for good. The launch is Triton's own
(``JITFunction.run`` with real tensors and the numbers as they are), up to the driver, whose calls do nothing here.
Prints, as JSON, how many kernels there were, by name too, and those that were not compiled or not found.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from volseg.config.loading import load_config
from volseg.device.compiling import Compiling, Specialization, take_capability
from volseg.device.triton_kernels import KernelCall, hearing_calls
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.experiment.network_plan import load_facts
from volseg.experiment.placement.training_work import at_size, describe_training

KINDS = {(8, 0): "a100-80", (9, 0): "h200"}


def main() -> None:
    """Compile, launch, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--capability", nargs=2, type=int, action="append", required=True)
    parser.add_argument("--count", action="store_true", help="say which kernels there are, and compile none")
    chosen = parser.parse_args()
    capabilities = [(major, minor) for major, minor in chosen.capability]
    heard = {each: follow_all(chosen.configs, chosen.set, each) for each in capabilities}
    problems: list[str] = []
    names: Counter[str] = Counter()
    for capability in capabilities:
        wanted = {found.key: found for found in map(Specialization.of, heard[capability])}
        names.update(each.home[1] for each in wanted.values())
        if chosen.count:
            continue
        with Compiling(capability, 1) as compiling:
            for call in heard[capability]:
                compiling.ask(call)
            problems += [each.problem for each in compiling.compiled if each.problem]
    before = list_cache()
    for capability in () if chosen.count else capabilities:
        launch_all(heard[capability], capability)
    anew = sorted(list_cache() - before)
    told = {"kernels": len(before), "counts": names}
    sys.stdout.write(json.dumps({**told, "problems": problems, "compiled_anew": anew}))


def follow_all(configs: list[Path], overrides: list[str], capability: tuple[int, int]) -> list[KernelCall]:
    """Return every kernel that a step of the configs asks for."""
    calls: list[KernelCall] = []
    for path in configs:
        config = load_config(path, overrides)
        described = describe_training(config, torch.bfloat16, load_facts(config, 1, 3))
        for size in config.patch.sizes:
            with hearing_calls(calls.append):
                trace_candidate(at_size(described, size).work, Candidate(kernels="fast"), find_kind(KINDS[capability]))
    return calls


def launch_all(calls: list[KernelCall], capability: tuple[int, int]) -> None:
    """Launch kernels by Triton's own function, on tensors that begin where those of the step do."""
    from triton.runtime import driver

    take_capability(capability)
    properties = {"max_shared_mem": 2**20, "multiprocessor_count": 132}
    driver.active.launcher_cls = lambda source, metadata: lambda *arguments: None
    driver.active.utils = SimpleNamespace(
        load_binary=lambda *arguments: (0, 0, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: properties,
    )
    for call in calls:
        function: Any = call.kernel.compiled
        function.device_caches.clear()  # of another capability
        options = {name: make_real(value) for name, value in call.options.items()}
        function[(1,)](*map(make_real, call.arguments), **options)


def make_real(value: Any) -> Any:
    """Return a tensor with an address in place of one without; numbers as they are."""
    if not isinstance(value, Tensor):
        return value
    begin = value.storage_offset() % (16 // value.element_size())
    return torch.empty(64, dtype=value.dtype)[begin:]


def list_cache() -> set[str]:
    """Return what Triton's cache holds."""
    from triton import knobs

    return {path.name for path in Path(knobs.cache.dir).iterdir()}


if __name__ == "__main__":
    main()
