"""The configs of popular guides load as they stand, those with offload too."""

import json
from pathlib import Path

import config.guides as guides
import pytest

from zerojax.config import ConfigError, MonitorConfig, OffloadOptimizer, load
from zerojax.config.explain import explain
from zerojax.config.schema import schema, table

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", guides.LOAD)
def test_it_loads_and_no_key_is_passed_over(name):
    config = load(guides.LOAD[name])
    rows, problems = explain(guides.LOAD[name])
    assert not problems
    assert all(row.why for row in rows)
    assert not [row for row in rows if row.given == "auto" and row.became != "resolved"]
    for world in (1, 2, 4, 8):
        assert config.batch(world).accumulation >= 1


def test_auto_throughout():
    for guide, stage in ((guides.HF_ZERO_2, 2), (guides.HF_ZERO_3, 3)):
        config = load(guide)
        assert (config.stage, config.fp16, config.bf16) == (stage, False, False)
        assert config.gradient_clipping == 1.0
        assert config.batch(8) == (None, None, 1)
        assert config.optimizer.with_defaults()["lr"] == 1e-3
        assert config.optimizer.with_defaults()["betas"] == (0.9, 0.999)
        assert config.scheduler.with_defaults()["warmup_num_steps"] == 1000
        assert config.stage3_param_persistence_threshold == 100_000
        assert config.steps_per_print == 2000
        chosen = load(guide, auto={"fp16.enabled": True, "train_micro_batch_size_per_gpu": 4})
        assert chosen.fp16
        assert chosen.batch(8) == (32, 4, 1)


def test_fp16_guides():
    first = load(guides.GETTING_STARTED)
    assert (first.stage, first.fp16, first.loss_scale) == (1, True, 0)
    assert load({**guides.GETTING_STARTED, "zero_optimization": False}).stage == 0
    tutorial = load(guides.TUTORIAL_ZERO_2_FP16)
    assert (tutorial.initial_scale_power, tutorial.loss_scale_window) == (15, 500)
    assert tutorial.stage == 2
    assert load(guides.MEGATRON_FP16).tensorboard == MonitorConfig(
        output_path="logs/", job_name="bloom"
    )


def test_names_without_the_prefix():
    notes = {note.key: note for note in load(guides.AXOLOTL_ZERO_3).notes}
    assert notes["zero_optimization.stage3_max_live_parameters"].status == "honoured"
    assert "nothing stays" in notes["zero_optimization.stage3_max_reuse_distance"].reason
    assert notes["zero_optimization.stage3_param_persistence_threshold"].holds == 100_000
    zero = {"stage": 3, "param_persistence_threshold": 5}
    assert load({"zero_optimization": zero}).stage3_param_persistence_threshold == 5
    zero["stage3_param_persistence_threshold"] = 6
    with pytest.raises(ConfigError, match=r"means the same as .*stage3_param_persistence_thre"):
        load({"zero_optimization": zero})


@pytest.mark.parametrize("name", ["gather_16bit", "stage3_gather_16bit", "stage3_gather_fp16"])
def test_every_name_of_16_bit_weights(name):
    config = load({"zero_optimization": {f"{name}_weights_on_model_save": True}})
    assert config.stage3_gather_16bit_weights_on_model_save


def test_only_the_program_knows_how_long_it_runs():
    with pytest.raises(ConfigError) as caught:
        load(guides.ACCELERATE_ZERO_3)
    assert len(caught.value.problems) == 1
    assert "scheduler.params.total_num_steps" in str(caught.value)
    config = load(guides.ACCELERATE_ZERO_3, auto={"scheduler.params.total_num_steps": 300})
    assert config.scheduler.params["total_num_steps"] == 300


@pytest.mark.parametrize("name", guides.OFFLOAD)
def test_offload_is_where_the_guide_puts_it(name):
    guide, devices = guides.OFFLOAD[name]
    config = load(guide)
    found = (config.offload_optimizer, config.offload_param)
    assert tuple(section and section.device for section in found) == devices
    rows, problems = explain(guide)
    assert not problems
    assert {row.became for row in rows if row.key.endswith(".pin_memory")} <= {"no effect"}


def test_a_config_may_name_its_schema():
    page = (CONFIGS.parent / "docs/configuration.md").read_text()
    assert table() in page, "python -m zerojax.config.schema table"
    held = json.loads((CONFIGS / "schema/config.json").read_text())
    assert held == schema(), "python -m zerojax.config.schema > configs/schema/config.json"
    zero = held["properties"]["zero_optimization"]["properties"]
    assert zero.keys() >= guides.AXOLOTL_ZERO_3["zero_optimization"].keys()
    assert "$schema" in json.loads((CONFIGS / "zero3.json").read_text())
    assert load({"$schema": "a.json"}).notes == load({}).notes
    assert explain({"$schema": "a.json"}) == explain({})


# Files as popular guides print them, where the workplace has them.
PRINTED = Path(__file__).parents[3] / "shared" / "guides"
STEPS = {"scheduler.params.total_num_steps": 300}
FILES = {
    "accelerate_zero2": ("fp16", 2, STEPS),
    "accelerate_zero3_offload": ("fp16", 3, STEPS),
    "llm_zero2_fp16": ("fp16", 2, None),
    "llm_zero3_offload": (None, 3, None),
    "standalone": ("bf16", 2, None),
    "trainer_7b_offload": ("bf16", 3, None),
    "trainer_fp16": ("fp16", 0, None),
    "trainer_zero3_bf16": ("bf16", 3, None),
}


def printed(name):
    path = PRINTED / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_printed_file_loads_verbatim(name):
    path, (dtype, stage, auto) = printed(name), FILES[name]
    config = load(path, auto=auto)
    assert (config.compute_dtype, config.stage) == (dtype, stage)
    assert config.check_grad_overflow == (dtype == "bf16")
    rows, problems = explain(path, auto=auto)
    assert not problems
    assert all(row.why and row.became not in ("wrong", "refused") for row in rows)
    assert ("bf16.check_grad_overflow" in [row.key for row in rows]) == (dtype == "bf16")
    assert config.batch(4 if name == "standalone" else 8)


def test_a_printed_section_loads_where_it_belongs():
    path = printed("nvme_section")
    with pytest.raises(ConfigError, match=r"belongs at `zero_optimization\.offload_optimizer`"):
        load(path)
    config = load({"zero_optimization": {"stage": 3, **json.loads(path.read_text())}})
    assert config.offload_optimizer == OffloadOptimizer(
        device="nvme", nvme_path="/local_nvme", buffer_count=5
    )
