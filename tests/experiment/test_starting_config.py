"""What ``volseg init`` writes explains every value, and reads back as the values it explains."""

from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.config.commented import describe_values, write_commented
from volseg.config.json_schema import list_keys, read_schema
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig, ParallelConfig, PatchConfig, TrainingConfig
from volseg.config.shipped import list_shipped
from volseg.config.yaml_values import parse_yaml
from volseg.errors import ConfigError
from volseg.experiment.configuring import PLAIN, init_config


def test_it_reads_back_as_the_defaults(tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml") == ExperimentConfig.model_validate(PLAIN)


def test_it_obeys_the_schema_that_it_names(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra dev")
    init_config(tmp_path / "a.yaml")
    jsonschema.validate(parse_yaml((tmp_path / "a.yaml").read_text(encoding="utf-8"), "a.yaml"), read_schema())


def test_every_value_has_its_meaning_above_it(tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml")
    lines = (tmp_path / "a.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# yaml-language-server: $schema=file://")
    depth: list[str] = []
    keys = []
    for above, line in pairwise(lines):
        text = line.strip()
        if not text or text.startswith(("#", "- ")):
            continue
        key, _, value = text.partition(":")
        depth = [*depth[: (len(line) - len(line.lstrip())) // 2], key]
        assert above.strip().startswith("# "), line
        if value:
            keys.append(".".join(depth))
    on_one_line = ("network", "optimizer", "schedule")  # a component and its parameters
    on_several = {"preprocessing", "losses", "logging.loggers"}  # lists of them
    expected = {key for key in list_keys(read_schema()) if key.partition(".")[0] not in on_one_line}
    assert {*keys} == {*expected, *on_one_line} - on_several
    text = "\n".join(lines)
    assert "One of: auto, fp32, bf16, fp16." in text
    assert "# Names: AHNet" in text
    assert "VNet" in text
    assert "# factor: Factor of the term in the sum." in text
    assert max(map(len, lines[1:])) <= 120


@pytest.mark.parametrize("name", list_shipped())
@pytest.mark.parametrize("minimal", [False, True])
def test_a_shipped_config_is_written_with_comments_and_stays_what_it_is(
    name: str, minimal: bool, tmp_path: Path
) -> None:
    init_config(tmp_path / "a.yaml", like=name, minimal=minimal)
    assert load_config(tmp_path / "a.yaml") == load_config(list_shipped()[name])


def test_minimal_leaves_out_the_defaults(tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml", minimal=True)
    written = parse_yaml((tmp_path / "a.yaml").read_text(encoding="utf-8"), "a.yaml")
    assert written == {**PLAIN, "patch": {"size": [96, 96, 96]}}


def test_values_that_yaml_takes_for_others_stay_text(tmp_path: Path) -> None:
    values = {
        **PLAIN,
        "name": "null",
        "data": {"root": "2024-05-01 Größe: #1", "cache": "none"},
        "losses": [{"name": "yes", "note": "a, {b}", "number": 1e-5, "nested": {"on": [None, True, "1e3"]}}],
        "evaluation": {"tolerance": {"no": 1.0, "Left lung": 2.0}},
    }
    config = ExperimentConfig.model_validate(values)
    write_commented(config, tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml") == config


def test_bounds_are_said_in_words() -> None:
    def say(section: type, key: str) -> str:
        return describe_values(section.model_fields[key])

    assert say(PatchConfig, "foreground") == "A number at least 0 and at most 1."
    assert say(TrainingConfig, "ema") == "A number above 0 and below 1; or null."
    assert say(PatchConfig, "size") == "3 values, a whole number at least 1 each."
    assert say(ParallelConfig, "checkpoint") == "One of: all, tiled; or a whole number at least 1; or null."


def test_the_verb_writes_and_says_what_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    told = CliRunner().invoke(app, ["init", "--data", "my data", "--minimal"], catch_exceptions=False)
    assert told.exit_code == 0
    assert "train experiment.yaml" in told.output
    assert "set data.root" not in told.output
    assert load_config("experiment.yaml").data.root == Path("my data")
    with pytest.raises(ConfigError, match="exists; choose"):
        CliRunner().invoke(app, ["init"], catch_exceptions=False)
    told = CliRunner().invoke(app, ["init", "--overwrite"], catch_exceptions=False)
    assert "set data.root" in told.output


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'task04_unet'"):
        init_config(tmp_path / "a.yaml", like="task04_unett")
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_comes_with_volseg_is_read_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("task04_unet") == load_config(list_shipped()["task04_unet"])
    assert load_config("msd/task09_spleen", ["seed=1"]).seed == 1
    with pytest.raises(ConfigError, match=r"volseg's own of that name is .*task04_unet\.yaml"):
        load_config("configs/task04_unet.yaml")
    with pytest.raises(ConfigError, match=r"a config that comes with volseg: did you mean 'task04_unet'"):
        load_config("task04_unett")
    (tmp_path / "task04_unet").write_text("name: own", encoding="utf-8")  # a file of that name is meant first
    with pytest.raises(ConfigError, match="task04_unet is no config of volseg: it has name"):
        load_config("task04_unet")
