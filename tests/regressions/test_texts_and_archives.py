"""Texts, archives and paths that led to untyped errors, other numbers, endless reading, or late refusals."""

import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile

import pytest

from volseg.config.loading import load_config
from volseg.config.yaml_values import parse_yaml
from volseg.data.fetching import unpack
from volseg.data.json_files import parse_json, read_json
from volseg.data.layouts.declared import read_manifest
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.exchange.archive import is_archive, read_archive, write_archive


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("network={<<: {name: UNet}}", "merge keys"),
        ("training.epochs=!!int abc", "tags"),
        ("training.epochs=1:30", "training.epochs: Input should be a valid integer, .*, got '1:30'"),
        ("training.deterministic=on", "training.deterministic: needed: true or false, got 'on'"),
        ("augmentation.mirror.axes=[yes, no, yes]", "augmentation.mirror.axes: needed: true or false"),
        ("network.res_block=off", "network: res_block is the text 'off'; write .* true or false"),
        ("network.filters=[1_000, 8]", "network: filters is the text '1_000'; write numbers as .* 1000"),
        ("training.epochs=" + "[" * 10_000, "nested too deeply"),
        ("preprocessing.\u00b2.name=x", "must be an index below"),
        ("preprocessing." + "9" * 5000 + ".name=x", "must be an index below"),
    ],
)
def test_an_ambiguous_or_unbounded_setting_is_refused(request, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(request.config.rootpath / "configs" / "quickstart.yaml", ["data.root=x", setting])


def test_keys_with_the_same_hash_are_refused():
    """A megabyte of them took half a minute, because all collide in a dictionary."""
    text = "\n".join(f"{(2**61 - 1) * (1000 + number)}: 1" for number in range(10))
    with pytest.raises(ConfigError, match=r"a key is the number .* more than 64 bits\n  in line 1"):
        parse_yaml(text, "x")


def test_the_manifest_of_many_cases_is_read(tmp_path):
    """Manifests of more than a megabyte, or 10,000 cases, were refused."""
    cases = "".join(f"- {{image: imagesTr/{i:060d}.nii.gz, label: labelsTr/{i:060d}.nii.gz}}\n" for i in range(12_000))
    (tmp_path / "task.yaml").write_text(f"training:\n{cases}", encoding="utf-8")
    found = read_manifest(tmp_path)
    assert found is not None
    assert len(found[1]["training"]) == 12_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 500 + b"]" * 500, "nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b"[NaN]", "NaN is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b"[" + b"9" * 5000 + b"]", "needs more than 64 bits"),
        (b"[18446744073709551616]", "needs more than 64 bits"),
        ('{"a": 1}'.encode("utf-16"), "text in UTF-16, as PowerShell writes it"),
        ("\u00fc".encode("latin-1"), "codec can't decode"),
        (b"[0" + b",0" * 4_000_001 + b"]", "more than 4000000 values"),
        (b"", "Expecting value"),
        (b"[1] [2]", "Extra data"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
def test_json_beyond_the_bounds_is_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.json cannot be read as JSON: .*{message}"):
        read_json(tmp_path / "a.json")


def test_nan_of_nnunet_and_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"Dice": NaN, "n": 18446744073709551615}')
    found = read_json(tmp_path / "a.json", has_nan=True)
    assert found["n"] == 2**64 - 1
    assert found["Dice"] != found["Dice"]


def test_damaged_yaml_and_json_are_read_or_refused(request):
    """400 damaged texts raise no other errors than those of the two readers."""
    text = (request.config.rootpath / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    pieces = ["&a ", "*a", "<<: ", "!!int ", "[" * 60, "{", "]", "'", '"', "\t", "\0", "---\n", "? ", ": ",
              "%YAML 1.1\n", "\\ud800", "9" * 400, "\r", "\x85", "| ", "> ", "NaN", "1e999", ",", "\ufeff"]  # fmt: skip
    json_text = json.dumps({"labels": {"0": "a", "1": [1, 2.5, None, True]}, "x": [{"y": "z"}]})
    readers = ((text, lambda damaged: parse_yaml(damaged, "x"), ConfigError), (json_text, parse_json, ValueError))
    for seed in range(200):
        draw = random.Random(seed)
        for whole, parse, error in readers:
            damaged = whole
            for _ in range(draw.randint(1, 4)):
                place = draw.randrange(len(damaged))
                damaged = damaged[:place] + draw.choice(pieces) + damaged[place + draw.choice((0, 1, 5)) :]
            try:
                parse(damaged)
            except error:
                continue


@pytest.mark.parametrize("manifest", [{"score": float("nan")}, {"score": float("inf")}])
def test_a_manifest_with_a_number_that_is_not_finite_is_not_written(tmp_path, manifest):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_archive(tmp_path / "model.zip", manifest, {})
    write_archive(tmp_path / "model.zip", {"score": None}, {})
    assert read_archive(tmp_path / "model.zip")[0]["score"] is None


# An archive with another checksum is never unpacked. Of one with the right checksum only plain files are written.


TARS = {
    "outside": ("T/../../outside", tarfile.REGTYPE, "is not a plain file inside it"),
    "absolute": ("/outside", tarfile.REGTYPE, "is not a plain file inside it"),
    "link": ("T/a", tarfile.SYMTYPE, "is not a plain file inside it"),
    "device": ("T/a", tarfile.BLKTYPE, "is not a plain file inside it"),
}


@pytest.mark.parametrize(("name", "kind", "message"), TARS.values(), ids=TARS)
def test_a_refused_tar_archive_writes_nothing_outside(name, kind, message, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match=message):
        unpack(tmp_path / "a.tar", tmp_path / "new")
    assert {path.name for path in tmp_path.rglob("*")} <= {"a.tar", "new", "T"}


def test_a_damaged_byte_of_a_model_file_is_harmless_or_refused(tmp_path):
    written = {"0/config.yaml": b"name: a", "0/weights": bytes(50)}
    whole = write_archive(tmp_path / "model.zip", {}, written).read_bytes()
    for place in range(len(whole)):
        for bits in (0xFF, 0x80):
            damaged = bytearray(whole)
            damaged[place] ^= bits
            (tmp_path / "model.zip").write_bytes(damaged)
            is_archive(tmp_path / "model.zip")
            try:
                _, members = read_archive(tmp_path / "model.zip")
            except CheckpointError:
                continue
            assert members == written


def test_a_compressed_model_file_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", bytes(10**7))
    with pytest.raises(CheckpointError, match="its members are compressed or overlap"):
        read_archive(tmp_path / "model.zip")


# A misspelt path was refused after 4 to 17 seconds: each verb imported torch before it looked for the path.


PROGRAM = """
import sys
from volseg.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train my_dta", "did you mean 'my_data'?"),
        ("train task04_unett", "did you mean 'task04_unet'"),
        ("train 4", "did you mean 'Dataset004_Heart'?"),
        ("cross-validate my.yaml", "my.yaml cannot be read: No such file"),
        ("configure my_dta -o my.yaml", "my_dta does not exist; name the TaskNN_Name folder"),
        ("data check my_dta", "did you mean 'my_data'?"),
        ("predict runs/first scan.nii.gz", "runs/first does not exist; name a run folder"),
        ("predict my_data scam.nii.gz", "did you mean 'scan.nii.gz'?"),
        ("evaluate --predictions my_data --labels nowhere", "nowhere does not exist; name a folder with a label map"),
        ("compare runs/first runs/second", "runs/first does not exist; name runs"),
        ("train task04_cpu --set data.root=my_dta", "did you mean 'my_data'?"),
        ("train task04_cpu --set training.epoch=5", "did you mean 'epochs'?"),
        ("export my_dta -o model.zip", "did you mean 'my_data'?"),
        ("data fetch Tsk4_Hipocampus", "did you mean 'Task04_Hippocampus'"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path, words, message):
    for name in ("my_data", "Dataset004_Heart"):
        (tmp_path / name).mkdir()
    (tmp_path / "scan.nii.gz").touch()
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "nnUNet_raw": "."},
        capture_output=True,
        encoding="utf-8",
    )
    assert ran.returncode == (2 if "Usage:" in ran.stderr else 1)
    assert message in " ".join(ran.stderr.replace("│", " ").split())
    assert ran.stdout.strip() == "False"
