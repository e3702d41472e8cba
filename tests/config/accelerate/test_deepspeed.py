"""The DeepSpeed section: the JSON beside it, what is filled in, and what contradicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerojax.config import ConfigError, OffloadOptimizer, load
from zerojax.config.explain import NOT_GIVEN, explain
from zerojax.config.keys import KEYS

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


def test_a_key_that_both_say_has_two_rows(folder: Path) -> None:
    fp16 = {"enabled": "true", "auto_cast": False}
    (folder / "ds.json").write_text(json.dumps({**JSON, "bf16": {"enabled": False}, "fp16": fp16}))
    path = yaml(folder, "zero_stage: 2, gradient_accumulation_steps: auto", "mixed_precision: fp16")
    rows = {row.key: row for row in explain(path).rows if row.given is not NOT_GIVEN}
    of_json = {key: row for key, row in rows.items() if key in KEYS}
    assert [*of_json] == [
        *("bf16.enabled", "zero_optimization.stage"),
        *("zero_optimization.offload_optimizer.device", "gradient_clipping"),
        *("gradient_accumulation_steps", "fp16.enabled", "fp16.auto_cast"),
    ]
    assert of_json["fp16.enabled"][1:4] == ("true", True, "honoured")
    assert rows["mixed_precision"][1:4] == ("fp16", "fp16", "honoured")
    assert of_json["gradient_accumulation_steps"][1:4] == (2, 2, "honoured")
    assert rows["deepspeed_config.gradient_accumulation_steps"][1:4] == ("auto", 2, "honoured")
    assert of_json["gradient_clipping"].why.startswith("DeepSpeed's default")


@pytest.mark.parametrize(
    ("section", "top", "of_yaml", "of_json"),
    [
        ("zero_stage: 3", "", "deepspeed_config.zero_stage = 3", "zero_optimization.stage = 2"),
        (
            "gradient_accumulation_steps: 4",
            "",
            "deepspeed_config.gradient_accumulation_steps = 4",
            "gradient_accumulation_steps = 2",
        ),
        ("", "mixed_precision: fp16", 'mixed_precision = "fp16"', "bf16.enabled = true"),
        ("", "mixed_precision: no", 'mixed_precision = "no"', "bf16.enabled = true"),
    ],
)
def test_a_contradiction_names_both(
    folder: Path, section: str, top: str, of_yaml: str, of_json: str
) -> None:
    (folder / "ds.json").write_text(json.dumps({**JSON, "bf16": {"enabled": "true"}}))
    with pytest.raises(ConfigError) as error:
        load(yaml(folder, section, top))
    (first, *_) = error.value.problems
    assert first.startswith(f"{of_yaml} says otherwise than {of_json}".replace("true", '"true"'))
    assert first.endswith(f"in {folder / 'ds.json'}; take one of them out")


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
        f'mixed_precision = "{yaml_has}" says otherwise than {json_has}.enabled = true in '
        f"{folder / 'ds.json'}; take one of them out"
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
    with pytest.raises(ConfigError, match="steps_per_print: stands there more than once"):
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
        (
            "zero_stage: 2, offload_param_device: cpu",
            'deepspeed_config.offload_param_device: "cpu" needs stage 3',
        ),
        ("gradient_clipping: much", 'expected a finite number of at least 0 or "auto"'),
    ],
)
def test_what_is_wrong_has_the_words_of_the_yaml(tmp_path: Path, section: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {{{section}}}\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert says in str(error.value)
    assert "zero_optimization" not in str(error.value)


def test_other_sections_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: DEEPSPEED\nfsdp_config: {fsdp_offload_params: true}\n")
    assert load(path).offload_optimizer is None
    row = explain(path).rows[1]
    assert (row.became, row.why) == ("no effect", "it is for distributed_type FSDP")
