"""A row for every key, whether or not the config would load."""

import config.guides as guides
import pytest
from config.test_load import NAMES, TREES
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.config import ConfigError, load
from zerojax.config.errors import quote_name
from zerojax.config.explain import NOT_GIVEN, explain
from zerojax.config.keys import KEYS

BAD = {
    "zero_optimisation": {"stage": 3},
    "zero_optimization": {"stage": 4, "offload_param": {"device": "cpu", "pin_memory": True}},
    "tensor_parallel": {"autotp_size": 2},
    "fp16": {"enabled": True, "loss_scale": -1},
    "optimizer": {"type": "AdmW", "params": {"lr": 1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warm": 1}},
    "bfloat16": {},
}


def rows_of(config, **more):
    rows, problems = explain(config, **more)
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}, problems


def test_what_became_of_each_kind():
    rows, _ = rows_of(
        {
            "zero_optimization": {"stage": 2, "contiguous_gradients": True},
            "fp16": {"hysteresis": 3},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "adam", "params": {"betas": [0.8, 0.9], "eps": "auto"}},
            "wandb": {},
        }
    )
    assert {key: (row.became, row.resolved) for key, row in rows.items()} == {
        "zero_optimization.stage": ("honoured", 2),
        "zero_optimization.contiguous_gradients": ("left to XLA", None),
        "fp16.hysteresis": ("no effect", None),
        "bf16.enabled": ("resolved", False),
        "optimizer.type": ("honoured", "adam"),
        "optimizer.params.betas": ("honoured", (0.8, 0.9)),
        "optimizer.params.eps": ("resolved", 1e-8),
        "wandb": ("no effect", None),
        "gradient_clipping": ("default", 1.0),
        "optimizer.params.lr": ("default", 1e-3),
    }
    assert all(row.why for row in rows.values())


def test_a_config_with_problems_has_all_its_rows():
    rows, problems = rows_of(BAD)
    assert [key for key, row in rows.items() if row.given is not NOT_GIVEN] == [
        "zero_optimisation",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.pin_memory",
        "tensor_parallel.autotp_size",
        "fp16.enabled",
        "fp16.loss_scale",
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warm",
        "bfloat16",
    ]
    assert {key for key, row in rows.items() if row.became == "wrong"} == {
        "zero_optimisation",
        "zero_optimization.stage",
        "fp16.loss_scale",
        "optimizer.type",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warm",
    }
    assert rows["zero_optimization.offload_param.device"].became == "honoured"
    assert rows["tensor_parallel.autotp_size"].became == "refused"
    assert rows["zero_optimisation"].why == "unknown key; did you mean `zero_optimization`?"
    assert rows["optimizer.params.lr"].became == "not judged"
    assert rows["fp16.enabled"].became == "honoured"
    with pytest.raises(ConfigError) as caught:
        load(BAD)
    assert caught.value.problems == problems
    assert len(problems) == 7


def test_the_batch_is_solved_for_the_devices():
    config = {"train_batch_size": 64, "gradient_accumulation_steps": "auto"}
    rows, problems = rows_of(config, devices=8)
    assert rows["train_micro_batch_size_per_gpu"][1:4] == (NOT_GIVEN, 8, "resolved")
    assert rows["gradient_accumulation_steps"][1:4] == ("auto", 1, "resolved")
    assert "on 8 devices" in rows["gradient_accumulation_steps"].why
    assert problems == ()
    assert "train_micro_batch_size_per_gpu" not in rows_of(config)[0]
    rows, (problem,) = rows_of(config, devices=7)
    assert problem.startswith("train_batch_size = 64 is not a multiple of 7 devices; use")
    assert rows["train_batch_size"].became == "wrong"
    assert rows_of({"train_batch_size": 64}, devices=1)[0]["train_batch_size"].resolved == 64
    assert "train_batch_size" not in rows_of({}, devices=8)[0]


def test_stand_ins_and_old_forms():
    auto = {"scheduler.params.total_num_steps": 300}
    rows, problems = rows_of(guides.ACCELERATE_ZERO_3, auto=auto)
    assert not problems
    assert rows["scheduler.params.total_num_steps"][1:4] == ("auto", 300, "resolved")
    rows, _ = rows_of(guides.GETTING_STARTED)
    assert rows["zero_optimization"][1:4] == (True, 1, "honoured")
    rows, _ = rows_of({"bfloat16": {"enabled": True}})
    assert rows["bfloat16.enabled"][1:4] == (True, True, "honoured")


def test_every_key_known():
    rows, problems = rows_of({"optimizer": {"type": "Lion"}}, every=True)
    assert not problems
    assert set(rows) >= set(KEYS) - {"optimizer.params", "scheduler.params"}
    assert rows["optimizer.params.betas"].resolved == (0.9, 0.99)
    assert rows["fp16.loss_scale_window"].resolved == 1000
    assert "off" not in {row.became for row in rows.values()}


@given(st.dictionaries(st.sampled_from(NAMES), TREES, max_size=6))
@settings(max_examples=200)
def test_any_dict_is_explained_as_it_is_loaded(config):
    rows, problems = explain(config)
    assert {row.key.partition(".")[0] for row in rows if row.given is not NOT_GIVEN} == {
        quote_name(name) for name in config
    }
    try:
        load(config)
        told = ()
    except ConfigError as error:
        told = error.problems
    assert told == problems
    assert problems or not {"refused", "wrong", "not judged"} & {row.became for row in rows}
