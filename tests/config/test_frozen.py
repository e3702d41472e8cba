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
    assert load({"gradient_clipping": 1.0, "steps_per_print": 3}) == ZeroConfig(
        gradient_clipping=1.0
    )


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"stag": 3}, "stag: unknown keyword; did you mean `stage`?"),
        ({"stage": 4}, "stage: expected 0, 1, 2 or 3, got 4"),
        ({"stage": True}, "got true"),
        ({"stage": None}, "got null"),
        ({"bf16": 1}, "bf16: expected true or false, got 1"),
        ({"bf16": "yes"}, "bf16: expected true or false"),
        ({"gradient_clipping": -1.0}, "gradient_clipping: expected"),
        ({"gradient_clipping": float("nan")}, "got NaN"),
        ({"gradient_clipping": float("inf")}, "got Infinity"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected"),
        ({"check_grad_overflow": True}, "check_grad_overflow = true is not supported"),
        ({"grad_accum_dtype": "f32"}, "grad_accum_dtype: expected"),
        ({"fp16": True}, "fp16: not supported: loss scaling is not there yet"),
        ({"zero_optimization": {}}, "pass the whole config as a dict"),
        ({"optimizer": {"type": "AdmW"}}, 'did you mean "AdamW"?'),
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


def test_keywords_report_all_problems():
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_keywords(stag=3, bf16=2, optimizer={"type": "x"})
    assert len(caught.value.problems) == 3


def test_whole_floats_are_sizes():
    assert ZeroConfig(stage3_param_persistence_threshold=1e5) == ZeroConfig()
    assert isinstance(
        ZeroConfig(stage3_param_persistence_threshold=1e5).stage3_param_persistence_threshold, int
    )
