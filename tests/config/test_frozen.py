"""The frozen config, made from keywords."""

import copy
import dataclasses
import pickle

import pytest

from zerojax.config import ConfigError, OptimizerConfig, SchedulerConfig, ZeroConfig, load


def test_keywords_ask_for_nothing_by_default():
    config = ZeroConfig()
    assert config.gradient_clipping == 0.0
    assert config.notes == ()
    assert config == ZeroConfig.from_keywords()


def test_frozen_hashable_and_copyable():
    config = ZeroConfig.from_keywords(
        stage=3,
        optimizer={"type": "adamw", "params": {"lr": 1, "betas": [0.9, 0.95]}},
        scheduler={"type": "WarmupLR"},
    )
    assert config.optimizer == OptimizerConfig(
        type="AdamW", params={"lr": 1.0, "betas": (0.9, 0.95)}
    )
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 2
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 2
    assert dataclasses.replace(config, stage=2).stage == 2


def test_notes_do_not_make_configs_differ():
    loaded = load({"gradient_clipping": 1.0, "steps_per_print": 3, "log_level": "info"})
    assert loaded == ZeroConfig(gradient_clipping=1.0, steps_per_print=3)
    assert loaded.notes


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"stag": 3}, "stag: unknown keyword; did you mean `stage`?"),
        ({"stage": 4}, "stage: expected 0, 1, 2 or 3, got 4"),
        ({"bf16": 1}, "bf16: expected true or false, got 1"),
        ({"gradient_clipping": -1.0}, "gradient_clipping: expected"),
        ({"gradient_clipping": float("nan")}, "got NaN"),
        ({"fp16": {"enabled": True}}, "fp16: expected true or false"),
        ({"fp16": True, "bf16": True}, "bfloat16 and fp16 modes cannot be simultaneously enabled"),
        ({"comet": {}}, "comet: not supported: use tensorboard, csv_monitor or wandb"),
        ({"elasticity": {}}, "elasticity: not supported: JAX has no agent that changes the number"),
        ({"zeropp_loco_param": {}}, "zeropp_loco_param: not supported: zerojax feeds no errors"),
        ({"steps_per_print": -1}, "steps_per_print: expected an integer of at least 0 or null"),
        ({"csv_monitor": "logs"}, "csv_monitor: expected MonitorConfig, a mapping"),
        ({"csv_monitor": {"jobname": "a"}}, "did you mean `job_name`?"),
        ({"tensorboard": {"job_name": 3}}, "tensorboard.job_name: expected a string, got 3"),
        ({"zero_optimization": {}}, "pass the complete config as a dict"),
        ({"optimizer": {"type": "Adam", "param": {}}}, "optimizer.param: unknown key"),
        ({"optimizer": "Adam"}, "optimizer: expected an object"),
        ({"scheduler": {}}, "scheduler.type: missing"),
        ({"notes": ()}, "notes: unknown keyword"),
    ],
)
def test_bad_keywords(keywords, says):
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_keywords(**keywords)
    assert says in str(caught.value)


def test_the_constructor_checks_too():
    with pytest.raises(ConfigError, match="stage"):
        ZeroConfig(stage=4)
    with pytest.raises(ConfigError, match="expected OptimizerConfig"):
        ZeroConfig(optimizer={"type": "Adam"})
    with pytest.raises(ConfigError, match=r"scheduler\.params: expected an object"):
        SchedulerConfig(type="WarmupLR", params=3)
    with pytest.raises(ConfigError, match="expected MonitorConfig or None"):
        ZeroConfig(tensorboard={})


def test_keywords_report_all_problems():
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_keywords(stag=3, bf16=2, optimizer={"type": "x"})
    assert len(caught.value.problems) == 3


def test_whole_floats_are_sizes():
    assert ZeroConfig(stage3_param_persistence_threshold=1e5) == ZeroConfig()
    assert isinstance(
        ZeroConfig(stage3_param_persistence_threshold=1e5).stage3_param_persistence_threshold, int
    )


def test_keywords_without_effect_are_noted():
    notes = {note.key: note for note in ZeroConfig(hysteresis=3, auto_cast=True).notes}
    assert notes["hysteresis"].status == "no effect"
    assert notes["hysteresis"].reason == "fp16 is off"
    assert "no dtype to cast to" in notes["auto_cast"].reason
    assert ZeroConfig(fp16=True, hysteresis=3, auto_cast=True).notes == ()
    assert ZeroConfig(bf16=True, auto_cast=True, check_grad_overflow=True).notes == ()
    (static,) = ZeroConfig(fp16=True, loss_scale=128, hysteresis=3).notes
    assert "static" in static.reason
    (overflow,) = ZeroConfig(fp16=True, check_grad_overflow=True).notes
    assert overflow.key == "check_grad_overflow"
    (threshold,) = ZeroConfig(stage=2, stage3_param_persistence_threshold=8).notes
    assert "only stage 3" in threshold.reason


def test_notes_follow_the_fields():
    off = ZeroConfig(hysteresis=3)
    assert dataclasses.replace(off, fp16=True).notes == ()
    assert len(dataclasses.replace(off, stage=2).notes) == 1
    loaded = load({"fp16": {"enabled": False, "hysteresis": 3}})
    assert [n.key for n in loaded.notes if "hysteresis" in n.key] == ["fp16.hysteresis"]


def test_zero_lines_are_none():
    assert ZeroConfig(steps_per_print=0) == ZeroConfig()
    assert load({"steps_per_print": None}).steps_per_print is None
