"""The DeepSpeed section: the JSON beside it, what is filled in, and what contradicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerojax.config import ConfigError, OffloadOptimizer, load
from zerojax.config.explain import explain

JSON: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a JSON, which is not the current one."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there" / "ds.json").write_text(json.dumps(JSON))
    return tmp_path / "there"


def yaml(folder: Path, section: str = "", top: str = "") -> Path:
    path = folder / "default_config.yaml"
    named = f"deepspeed_config_file: ds.json, {section}"
    path.write_text(f"distributed_type: DEEPSPEED\n{top}\ndeepspeed_config: {{{named}}}\n")
    return path


def test_what_is_auto_in_the_json_is_filled_in(folder: Path) -> None:
    path = yaml(
        folder,
        "gradient_clipping: 0.5, offload_optimizer_device: cpu, zero_stage: 2, "
        "gradient_accumulation_steps: auto, zero3_save_16bit_model: true",
        "mixed_precision: bf16",
    )
    config = load(path)
    assert (config.stage, config.bf16, config.gradient_clipping) == (2, True, 0.5)
    assert config.gradient_accumulation_steps == 2
    assert config.offload_optimizer == OffloadOptimizer()
    assert config.stage3_gather_16bit_weights_on_model_save
    rows = {row.key: row for row in explain(path).rows}
    assert rows["deepspeed_config.gradient_clipping"].resolved == 0.5
    assert str(folder / "ds.json") in rows["deepspeed_config.deepspeed_config_file"].why
    assert rows["gradient_clipping"].given == "auto"
    assert rows["gradient_clipping"].why == "deepspeed_config.gradient_clipping says it"


def test_the_json_speaks_where_the_yaml_is_silent(folder: Path) -> None:
    config = load(yaml(folder), auto={"bf16.enabled": True})
    assert (config.stage, config.bf16, config.gradient_clipping) == (2, True, 1.0)
    assert not load(yaml(folder)).bf16


@pytest.mark.parametrize(
    ("section", "top", "of_yaml", "of_json"),
    [
        ("zero_stage: 3", "", "deepspeed_config.zero_stage = 3", "zero_optimization.stage = 2"),
        ("", "mixed_precision: fp16", 'mixed_precision = "fp16"', "bf16.enabled = true"),
    ],
)
def test_a_contradiction_names_both(
    folder: Path, section: str, top: str, of_yaml: str, of_json: str
) -> None:
    (folder / "ds.json").write_text(json.dumps({**JSON, "bf16": {"enabled": "true"}}))
    with pytest.raises(ConfigError) as error:
        load(yaml(folder, section, top))
    (first, *_) = error.value.problems
    assert first.startswith(f"{of_yaml} contradicts {of_json}".replace("true", '"true"'))
    assert first.endswith(f"in {folder / 'ds.json'}; remove one of them")


@pytest.mark.parametrize(("yaml_has", "json_has"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_another_dtype_than_the_json_is_one_problem(
    folder: Path, yaml_has: str, json_has: str
) -> None:
    (folder / "ds.json").write_text(json.dumps({json_has: {"enabled": True}}))
    path = yaml(folder, top=f"mixed_precision: {yaml_has}")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == (
        f"{path} (deepspeed_config_file: {folder / 'ds.json'}): "
        f'mixed_precision = "{yaml_has}" contradicts {json_has}.enabled = true in '
        f"{folder / 'ds.json'}; remove one of them"
    )


def test_problems_of_the_json_name_the_json(folder: Path) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2, "stge": 3}}')
    with pytest.raises(
        ConfigError, match=r"\(deepspeed_config_file: .*/ds\.json\): zero_opt.*stge"
    ):
        load(yaml(folder))
    (folder / "ds.json").write_text('{"fp16": }')
    with pytest.raises(ConfigError, match=r"deepspeed_config_file: .*ds\.json: not valid JSON at"):
        load(yaml(folder))
    (folder / "ds.json").write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    with pytest.raises(ConfigError, match="steps_per_print: is set twice"):
        load(yaml(folder))


def test_the_json_beside_the_yaml_or_in_the_current_folder(folder: Path) -> None:
    here = folder.parent / "here" / "ds.json"
    here.write_text(json.dumps(JSON | {"steps_per_print": 7}))
    with pytest.raises(ConfigError, match=r"exists beside the YAML and in .*/here; write the full"):
        load(yaml(folder))
    (folder / "ds.json").unlink()
    assert load(yaml(folder)).steps_per_print == 7
    here.unlink()
    with pytest.raises(ConfigError, match=r"no such file: ds\.json in .*/there or in .*/here"):
        load(yaml(folder))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("zero_stge: 3", "deepspeed_config.zero_stge: unknown key; did you mean"),
        (
            "zero_stage: 2, offload_optimizer_device: nvme",
            'deepspeed_config.offload_optimizer_nvme_path: device "nvme" needs the folder',
        ),
    ],
)
def test_what_is_wrong_has_the_words_of_the_yaml(tmp_path: Path, section: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {{{section}}}\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert says in str(error.value)
    assert "zero_optimization" not in str(error.value)
