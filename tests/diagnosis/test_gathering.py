"""Facts gathered from this machine, and from processes with restricted resources."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from kernels import DEVICE, with_kernels

from volseg import memory as main_memory
from volseg.diagnosis.doctor import (
    SCHEMA_VERSION,
    Diagnosis,
    MachineFinding,
    ask,
    check,
    diagnose,
    gather,
    show_diagnosis,
)
from volseg.diagnosis.gatherers import gather_folders, gather_packages, list_bus, look_at, read_module
from volseg.diagnosis.trials import try_kernel
from volseg.memory import read_limits


def answer(command: list[str], name: str) -> dict:
    """Run a gatherer's process behind another command, and read its section."""
    ran = subprocess.run(
        [*command, sys.executable, "-m", "volseg.diagnosis.gatherers", name], capture_output=True, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.usefixtures("ready_python")
def test_what_is_quick_is_gathered_of_this_machine() -> None:
    diagnosis = diagnose(quick=True)
    facts = diagnosis.facts
    assert facts["failures"] == []
    assert facts["python"]["version"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert facts["system"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["packages"]["versions"]["monai"]
    assert not facts.keys() & {"links", "all_reduce", "compiler", "imports"}
    assert {"python", "torch", "memory", "disk.cache", "disk.runs"} <= {one.check for one in diagnosis.findings}
    as_json = json.loads(json.dumps(diagnosis.as_dict()))
    assert as_json["schema"] == SCHEMA_VERSION
    assert as_json["findings"][0].keys() == {"check", "level", "found", "why", "remedy"}
    assert as_json["facts"] == facts


@pytest.mark.usefixtures("ready_python")
def test_processes_really_add_up() -> None:
    facts = gather(["all_reduce"])
    assert facts["failures"] == []
    tried = facts["all_reduce"]
    assert tried["is_right"]
    assert tried["processes"] >= 1
    assert tried["seconds"] > 0


@pytest.mark.usefixtures("ready_python")
def test_processes_that_cannot_meet_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no_such_interface")
    facts = gather(["all_reduce"])
    assert "all_reduce" not in facts
    assert [failure["name"] for failure in facts["failures"]] == ["all_reduce"]
    assert "nterface" in facts["failures"][0]["reason"]
    assert "GLOO_SOCKET_IFNAME" in check(facts)[0].remedy


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_limits_of_a_process_are_found() -> None:
    system = answer(["prlimit", "--nofile=100:200"], "system")
    assert [system[key] for key in ("open_files", "open_files_hard")] == [100, 200]
    found = {one.check: (one.level, one.found) for one in check({"system": system})}
    assert found["open_files"] == ("error", "at most 100 open files per process")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_shared_memory_as_small_as_dockers_is_found() -> None:
    inner = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a process mount a file system of its own")
    system = answer(alone, "system")
    assert system["shared_memory_bytes"] == 64 * 2**20
    finding = next(one for one in check({"system": system}) if one.check == "shared_memory")
    assert (finding.level, "64 MiB" in finding.found) == ("note", True)


@pytest.mark.parametrize(
    ("own", "files", "memory", "cores"),
    [
        ("0::/\n", {"memory.max": "2147483648", "cpu.max": "150000 100000"}, 2**31, 1.5),
        ("0::/\n", {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        # A container that sees the path of the outside: its own limits lie at the top.
        ("0::/docker/abc\n", {"memory.max": "1073741824"}, 2**30, None),
        # A step below a job: the job's limit counts where it is the smaller one.
        ("0::/job/step\n", {"job/memory.max": "1073741824", "job/step/memory.max": "max"}, 2**30, None),
        ("4:memory:/box\n1:cpu,cpuacct:/box\n", {"memory/box/memory.limit_in_bytes": "3221225472"}, None, None),
        ("4:memory:/box\n", {"memory.max": "1073741824"}, 2**30, None),
        ("0::/größe\n", {"größe/memory.max": "1073741824"}, 2**30, None),
        ("0::/\n", {}, None, None),
    ],
)
def test_limits_of_a_container_are_found(
    tmp_path: Path, own: str, files: dict[str, str], memory: int | None, cores: float | None
) -> None:
    group = tmp_path / "own"
    group.write_text(own, encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    assert read_limits(tmp_path / "cgroup", group) == (memory, cores)


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_memory, "read_limits", lambda: (2**20, None))
    assert main_memory.total_bytes() == main_memory.available_bytes() == 2**20


def test_a_gatherer_that_hangs_is_ended_with_what_it_started_and_named(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = 'sleep 600 & echo $! > "$1"; echo waiting for a GPU >&2; wait'
    failure = ask("links", ("sh", "-c", code, "sh", str(pids)), 3)
    reason = "no answer within 3 s; its last output: waiting for a GPU"
    assert failure == {"name": "links", "reason": reason, "timed_out": True}
    (finding,) = check({"failures": [failure]})
    assert (finding.check, finding.level) == ("links", "error")
    assert "timed out" in finding.found
    child = Path(f"/proc/{pids.read_text(encoding='utf-8').strip()}/stat")
    while child.exists() and child.read_text(encoding="utf-8").split()[2] != "Z":  # the kill is on its way
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        (sys.executable, "raise OSError('libcuda.so.1: cannot open shared object file')", "libcuda.so.1"),
        (sys.executable, "import sys; sys.exit(3)", "exit status 3"),
        (sys.executable, "import sys; sys.exit('a:1:2 NCCL WARN refused\\nNCCL WARN b\\nerror')", "refused | error"),
        (sys.executable, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
        (sys.executable, "print('[]')", "its output is not a JSON object: '[]"),
        (sys.executable, "print('hello')", "hello"),
        ("/nowhere/python", "", "could not be started"),
    ],
)
def test_a_gatherer_that_fails_is_a_finding(program: str, code: str, reason: str) -> None:
    failure = ask("torch", (program, "-c", code), 60)
    assert reason in failure["reason"]
    assert [(one.check, one.level) for one in check({"failures": [failure]})] == [("torch", "error")]


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.write(1, b'NCCL INFO'); raise ImportError('libcudnn.so.9: cannot open')"
    (tmp_path / "torch.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    facts = gather(["torch", "python"])
    assert "libcudnn.so.9" in facts["failures"][0]["reason"]
    assert [one.check for one in check(facts) if one.level == "error"] == ["torch"]
    # What libraries print does not get into the answer.
    ran = subprocess.run([sys.executable, "-m", "volseg.diagnosis.gatherers", "torch"], capture_output=True)
    assert ran.stdout == b""
    assert b"NCCL INFO" in ran.stderr


@with_kernels
def test_the_kernel_that_is_tried_computes_what_torch_does() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_CACHE_DIR", "set by the trial")
        assert try_kernel(str(DEVICE))


@pytest.mark.gpu
def test_a_kernel_is_compiled_and_where_there_is_no_compiler_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = gather(["compiler", "torch"])
    assert sound["compiler"]["kernel"] == "right", sound["compiler"]
    monkeypatch.setenv("CC", "/nowhere/gcc")
    finding = next(one for one in check(gather(["compiler", "torch"])) if one.check == "triton")
    assert finding.level in ("warning", "error")
    assert "gcc" in finding.remedy


@pytest.mark.gpu
def test_a_machine_with_gpus_is_seen_as_torch_sees_it() -> None:
    facts = gather(["torch", "driver", "links", "all_reduce"])
    assert facts["failures"] == []
    count = torch.cuda.device_count()
    names = [gpu["name"] for gpu in facts["torch"]["gpus"]]
    assert names == [torch.cuda.get_device_name(index) for index in range(count)]
    assert facts["driver"]["version"]
    assert len(facts["links"]["peers"]) == count * (count - 1)
    assert all(peer["is_right"] for peer in facts["links"]["peers"])
    assert (facts["all_reduce"]["backend"], facts["all_reduce"]["processes"]) == ("nccl", count)
    assert facts["all_reduce"]["is_right"]


def test_folders_are_written_to_and_left_as_they_were(tmp_path: Path) -> None:
    there = look_at("cache", tmp_path / "not" / "yet")
    assert (there["path"], there["existing"]) == (str(tmp_path / "not" / "yet"), str(tmp_path))
    assert there["refused"] is None
    assert there["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    assert look_at("runs", Path("/proc/self/runs"))["refused"], "a folder that takes no file"


def test_the_cache_is_looked_for_where_cases_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as in our image, where ~/.cache was looked at
    for named, expected in (("", [str(tmp_path / "volseg")]), ("none", [])):
        monkeypatch.setenv("VOLSEG_CACHE", named)
        assert [one["path"] for one in gather_folders()["folders"] if one["role"] == "cache"] == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Thu Sep 18 2026\n", ("580.95.05", False)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.91.07  Release Build\n", ("595.91.07", True)),
        ("something else\n", (None, False)),
    ],
)
def test_the_kernel_module_is_read(tmp_path: Path, text: str, told: tuple[str | None, bool]) -> None:
    version = tmp_path / "version"
    version.write_text(text, encoding="utf-8")
    assert read_module(version) == told
    assert read_module(tmp_path / "none") == (None, None)


def test_gpus_are_found_on_the_bus(tmp_path: Path) -> None:
    devices = {
        "0000:00:1e.0": ("0x10de", "0x030200", "0x1db1"),
        "0000:00:1e.1": ("0x10de", "0x040300", "0x10f0"),  # its sound
        "0000:00:02.0": ("0x8086", "0x030000", "0x9a49"),  # another maker's
    }
    for address, values in devices.items():
        (tmp_path / address).mkdir()
        for name, value in zip(("vendor", "class", "device"), values, strict=True):
            (tmp_path / address / name).write_text(f"{value}\n", encoding="ascii")
    assert list(list_bus(tmp_path)) == [{"address": "0000:00:1e.0", "device": 0x1DB1}]
    assert list(list_bus(tmp_path / "none")) == []


def install(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n", encoding="utf-8")


def test_packages_that_do_not_fit_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tmp_path / "one"
    never = ('never; extra == "never"', 'nowhere; sys_platform == "none"')
    install(one, "volseg", "1.0", "monai>=2", "gone", "numpy==1.*", *never)
    install(one, "monai", "1.5")
    install(one, "numpy", "1.2")
    monkeypatch.setattr(sys, "path", [str(one)])
    found = gather_packages()
    assert found["versions"] == {"monai": "1.5", "gone": None, "numpy": "1.2"}
    unmet = ["monai>=2, but 1.5 is installed", "gone, but it is not installed"]
    assert found["unmet"] == [f"volseg needs {one}" for one in unmet]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where no package says what it is
    found = gather_packages()
    assert (found["is_installed"], found["unmet"]) == (False, [])


def made_up(*levels: str) -> Diagnosis:
    findings = [
        MachineFinding(
            check=f"check.{level}",
            level=level,
            found="what was found " * 6,
            why="" if level == "ok" else "why it matters",
            remedy="" if level == "ok" else "sudo fix it",
        )
        for level in levels
    ]
    return Diagnosis(findings=findings, facts={}, seconds=1.0)


def test_a_terminal_shows_the_worst_last_with_its_remedy() -> None:
    text = StringIO()
    diagnosis = made_up("error", "ok", "warning", "note", "ok")
    show_diagnosis(diagnosis, file=text, width=60)
    lines = text.getvalue().splitlines()
    names = [line.split()[1] for line in lines[:-1] if line[0] != " "]
    assert names == ["check.ok", "check.ok", "check.note", "check.warning", "check.error"]
    assert "fix: sudo fix it" in lines[-2]
    assert lines[-1] == "1 error, 1 warning, 1 note, 2 checks passed (1 s)"
    assert max(map(len, lines)) <= 60
    assert (diagnosis.level, diagnosis.is_sound) == ("error", False)
    assert made_up("warning", "ok").is_sound


@pytest.mark.usefixtures("ready_python")
def test_the_verb_tells_by_its_status_and_holds_in_a_locale_without_utf8(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "volseg", "doctor", "--quick", "--runs", "/proc/self/runs"]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run(command, capture_output=True, cwd=tmp_path, env=plain)
    told = ran.stdout.decode("ascii")
    assert ran.returncode == 1, ran.stderr
    assert re.search(r"^ERROR +disk\.runs +/proc/self is not writable", told, re.MULTILINE)
