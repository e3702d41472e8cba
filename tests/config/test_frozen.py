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
        ({"bf16": 1}, "bf16: expected true or false, got 1"),
        ({"fp16": {"enabled": True}}, "fp16: expected true or false"),
        ({"comet": {}}, "comet: not supported: use tensorboard, csv_monitor or wandb"),
        ({"elasticity": {}}, "elasticity: not supported: JAX has no agent that changes the number"),
        ({"zeropp_loco_param": {}}, "zeropp_loco_param: not supported: no error is fed back"),
        ({"csv_monitor": "logs"}, "csv_monitor: expected MonitorConfig, a mapping"),
        ({"csv_monitor": {"jobname": "a"}}, "did you mean `csv_monitor.job_name`?"),
        ({"zero_optimization": {}}, "pass the complete config as a dict"),
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
