"""Accelerate's YAML is the JSON that says the same, and every key of it has its row."""

import json
from pathlib import Path
from typing import Any

import pytest
from config.accelerate import yamls

from zerojax.config import ConfigError, load
from zerojax.config.explain import NOT_GIVEN, explain
from zerojax.config.files import read_json
from zerojax.config.load import as_json

# Files as popular guides print them, where the workplace has them.
PRINTED = Path(__file__).parents[4] / "shared" / "guides"
STEPS = {"scheduler.params.total_num_steps": 300}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "default_config.yaml"


def problems(path: Path, text: str) -> tuple[str, ...]:
    """What is wrong with a file, which `explain` and `load` say alike."""
    path.write_text(text)
    rows, said = explain(path)
    bad = [row for row in rows if row.became in ("wrong", "refused")]
    assert bad
    assert all(row.why for row in rows)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert error.value.problems == said
    assert error.value.source == str(path)
    return said


@pytest.mark.parametrize("name", yamls.SAME)
def test_it_is_the_json_of_the_same_meaning(name: str, path: Path) -> None:
    path.write_text(yamls.text(name))
    assert load(path) == load(yamls.SAME[name][1])
    assert load(as_json(path).raw) == load(path)


@pytest.mark.parametrize("name", yamls.SAME)
def test_every_key_has_its_row_in_order(name: str, path: Path) -> None:
    path.write_text(yamls.text(name))
    rows, said = explain(path)
    keys = []
    for key, value in read_json(path).raw.items():
        keys += [f"{key}.{inner}" for inner in value] if value and type(value) is dict else [key]
    assert said == ()
    assert [row.key for row in rows if row.given is not NOT_GIVEN] == keys
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.why and row.became not in ("wrong", "refused") for row in rows)


def test_what_became_of_each_kind(path: Path) -> None:
    path.write_text(yamls.text("FSDP 1"))
    rows = {row.key: row for row in explain(path).rows}
    became = {key.rpartition("_config.")[2]: row.became for key, row in rows.items()}
    assert became["num_processes"] == became["use_cpu"] == "left to launch"
    assert became["fsdp_backward_prefetch"] == "left to XLA"
    assert became["fsdp_state_dict_type"] == became["main_training_function"] == "no effect"
    assert "nn.remat" in rows["fsdp_config.fsdp_activation_checkpointing"].why
    strategy = rows["fsdp_config.fsdp_sharding_strategy"]
    assert (strategy.given, strategy.resolved, strategy.became) == ("FULL_SHARD", 3, "honoured")
    assert strategy.why.startswith("zero_optimization.stage: ")
    clipping = rows["gradient_clipping"]
    assert (clipping.given, clipping.resolved, clipping.became) == (NOT_GIVEN, 0.0, "default")
    assert clipping.why == 'FSDP clips nothing by itself; auto={"gradient_clipping": 1.0} does'
    assert rows["bf16.check_grad_overflow"][2:4] == (False, "default")


def test_the_plan_has_the_keys_of_the_yaml(path: Path) -> None:
    path.write_text(yamls.text("FSDP 2 in groups"))
    notes = {note.key: note for note in load(path).notes}
    assert notes["fsdp_config.fsdp_activation_checkpointing"].status == "no effect"
    assert "zero_optimization.mics_shard_size" not in notes
    assert notes["parallelism_config.parallelism_config_dp_shard_size"].sets == (
        "zero_optimization.mics_shard_size",
    )
    assert load(path).words("mics_shard_size") == (
        "parallelism_config.parallelism_config_dp_shard_size = 4"
    )


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MULTI_GPU"])
def test_what_accelerate_takes_from_the_program(path: Path, kind: str) -> None:
    path.write_text(f"distributed_type: {kind}")
    auto = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4}
    config = load(path, auto=auto)
    assert (config.gradient_clipping, config.gradient_accumulation_steps) == (0.5, 4)
    rows = {row.key: row for row in explain(path, auto=auto).rows}
    assert rows["gradient_clipping"][1:4] == ("auto", 0.5, "resolved")
    with pytest.raises(ConfigError, match='"steps_per_print" is not "auto" in the config'):
        load(path, auto={"steps_per_print": 3})


def test_a_mapping_and_a_json_of_accelerates_form(path: Path) -> None:
    raw: dict[str, Any] = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}
    as_file = path.with_suffix(".json")
    as_file.write_text(json.dumps(raw))
    assert load(raw).stage == load(as_file).stage == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("distributed_typ: FSDP", "distributed_type: missing; `accelerate config` writes it"),
        ("zero_optimization: {stage: 3}", "a DeepSpeed config is a .json"),
        ("distributed_type: MULTI_NPU", "JAX has GPUs, TPUs and CPUs; write MULTI_GPU"),
        ("distributed_type: MEGATRON_LM", "DEEPSPEED with zero_stage 1"),
        ("distributed_type: NO\nmixed_precision: fp8", "the compute dtypes are bf16 and fp16"),
        (
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO",
            'compute_environment = "AMAZON_SAGEMAKER" is not supported',
        ),
    ],
)
def test_what_is_wrong_is_named(path: Path, text: str, says: str) -> None:
    assert says in "\n".join(problems(path, text))


@pytest.mark.parametrize(
    ("name", "stage", "auto"),
    [
        ("accelerate_cls", 2, None),
        ("accelerate_seq2seq", 2, STEPS),
        ("accelerate_clm", 3, STEPS),
    ],
)
def test_a_printed_file_loads_verbatim(name: str, stage: int, auto: dict[str, Any] | None) -> None:
    path = PRINTED / f"{name}.yaml"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    config = load(path, auto=auto)
    assert (config.stage, config.fp16, config.batch(2).accumulation) == (stage, True, 1)
    assert config.gradient_clipping == 1.0
    assert (config.offload_param is not None) == (stage == 3)
    rows, said = explain(path, auto=auto, devices=2)
    assert said == ()
    assert all(row.why and row.became not in ("wrong", "refused") for row in rows)
    keys = [row.key for row in rows]
    assert len({*keys}) == len(keys)
    assert {*read_json(path).raw} <= {key.partition(".")[0] for key in keys}
    if named := read_json(path).raw["deepspeed_config"].get("deepspeed_config_file"):
        of_json = explain(PRINTED / named).rows
        assert {row.key for row in of_json if row.given is not NOT_GIVEN} <= {*keys}
