"""What the package's Triton kernels take of a GPU, as its assembler says it: registers, spills, shared memory.

python workflows/benchmarks/kernel_resources.py configs/task04_unet.yaml configs/task04_vnet.yaml \
    --capability 7 0 --capability 8 0 --capability 9 0 --output kernels_cpu_resources.json

Follows a training step of each config and compiles every kernel that it asks for, for each capability, by the
compiler and the ptxas that Triton carries. ``fits`` says whether a multiprocessor holds one program of the kernel at
all. Nothing is run, so nothing is said of speed.
"""

import argparse
import json
import multiprocessing
import platform
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton

from volseg.config.loading import load_config
from volseg.device.compiling import Specialization, take_capability
from volseg.device.triton_kernels import KernelCall, hearing_calls
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.experiment.data_facts import find_facts
from volseg.experiment.training_work import describe_training

SHARED = {70: 96, 75: 64, 80: 163, 90: 227}
"""KiB of shared memory that one program has at most, by capability: CUDA's programming guide."""

REGISTERS = 2**16
"""Of a multiprocessor, 32 bits each."""

USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

Row = dict[str, Any]


def main() -> None:
    """Compile, ask, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], help="overrides of all configs")
    parser.add_argument("--capability", nargs=2, type=int, action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    told = parser.parse_args()
    wanted = {each.key: each for path in told.configs for each in follow(path, told.set)}
    rows: list[Row] = []
    for major, minor in told.capability:
        # Triton's current device is taken for good: a process for each.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            rows += pool.apply(compile_all, (list(wanted.values()), (major, minor)))
    found = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, no GPU: compiled, not run",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "ptxas": ask_version()},
        "variants": len(wanted),
        "worst": summarize(rows),
        "rows": rows,
    }
    told.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["worst"]:
        sys.stdout.write(json.dumps(row) + "\n")


def follow(path: Path, overrides: list[str]) -> list[Specialization]:
    """Return what a training step of a config needs to be compiled."""
    calls: list[KernelCall] = []
    config = load_config(path, overrides)
    work = describe_training(config, torch.bfloat16, find_facts(config, 1, 3)).work
    with hearing_calls(calls.append):
        trace_candidate(work, Candidate(kernels="fast"), find_kind("h200"))
    return [Specialization.of(call) for call in calls]


def compile_all(wanted: list[Specialization], capability: tuple[int, int]) -> list[Row]:
    """Compile for a capability; say what each takes."""
    take_capability(capability)
    return [compile_one(each, 10 * capability[0] + capability[1]) for each in wanted]


def compile_one(wanted: Specialization, arch: int) -> Row:
    """Compile one kernel for a capability, and ask the assembler."""
    module, name = wanted.home
    options = {key: value for key, value in wanted.options if isinstance(value, bool | int)}
    row: Row = {"kernel": f"{module.removeprefix('volseg.')}.{name}", "arch": f"sm_{arch}", "options": options}
    try:
        binary = getattr(import_module(module), name).compiled.warmup(
            *wanted.arguments, grid=(1,), **dict(wanted.options)
        )
    except Exception as fault:  # whatever the compiler says is what is asked for
        return {**row, "problem": f"{type(fault).__name__}: {str(fault)[:300]}", "fits": False}
    shared, warps = binary.metadata.shared, binary.metadata.num_warps
    row |= {**assemble(binary.asm["ptx"]), "shared_bytes": shared, "warps": warps}
    row["fits"] = shared <= SHARED[arch] * 1024 and row["registers"] * 32 * warps <= REGISTERS
    return row


def assemble(ptx: str) -> dict[str, int]:
    """Return what Triton's ptxas says of a kernel."""
    (target,) = re.findall(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        said = subprocess.run(
            [find_assembler(), "-v", f"--gpu-name={target}", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stderr
    (registers,) = USED.findall(said)
    stack, stores, loads = SPILLED.search(said).groups()  # type: ignore[union-attr]
    return {
        "registers": int(registers),
        "stack_bytes": int(stack),
        "spill_store_bytes": int(stores),
        "spill_load_bytes": int(loads),
    }


def find_assembler() -> str:
    """Return the ptxas that Triton carries."""
    from triton.backends.nvidia import compiler

    return str(Path(compiler.__file__).parent / "bin" / "ptxas")


def ask_version() -> str:
    """Return the assembler's version."""
    said = subprocess.run([find_assembler(), "--version"], capture_output=True, encoding="utf-8", check=True).stdout
    return re.findall(r"V[\d.]+", said)[0]


def summarize(rows: list[Row]) -> list[Row]:
    """Return of each kernel and capability the variant that takes most, and how many do not fit or spill."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["arch"]].append(row)
    return [
        {
            "kernel": kernel,
            "arch": arch,
            "variants": len(group),
            **{
                what: max((row[what] for row in group if what in row), default=None)
                for what in ("registers", "spill_store_bytes", "spill_load_bytes", "shared_bytes")
            },
            "do_not_fit": sum(not row["fits"] for row in group),
            "do_not_compile": sum("problem" in row for row in group),
        }
        for (kernel, arch), group in sorted(groups.items())
    ]


if __name__ == "__main__":
    main()
