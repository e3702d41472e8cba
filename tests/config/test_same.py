"""A typed config, keywords and JSON say the same things, field by field."""

import dataclasses

import pytest
from config.test_xla_options import VALUES as XLA_OPTIONS

from zerojax.config import (
    Fp8Config,
    MonitorConfig,
    OffloadOptimizer,
    OffloadParam,
    OptimizerConfig,
    SchedulerConfig,
    WandbConfig,
    ZeroConfig,
    load,
)
from zerojax.config.sections import AutotuningConfig
from zerojax.config.settings import BY_FIELD

# Each field: the JSON that sets it, and its value from keywords and typed.
FIELDS = {
    "bf16": ({"bf16": {"enabled": True, "check_grad_overflow": False}}, True),
    "fp16": ({"fp16": {"enabled": True}}, True),
    **{
        name: ({"fp16": {name: value}}, value)
        for name, value in {
            "auto_cast": True,
            "loss_scale": 128.0,
            "initial_scale_power": 8,
            "loss_scale_window": 50,
            "hysteresis": 1,
            "consecutive_hysteresis": True,
            "min_loss_scale": 4.0,
            "raise_error_at_min_scale": False,
        }.items()
    },
    "check_grad_overflow": ({"bf16": {"check_grad_overflow": True}}, True),
    "bf16_optimizer_states": ({"bf16": {"bf16_optimizer_states": True}}, True),
    "check_finite": ({"check_finite": True}, True),
    "accumulate_statistics": ({"accumulate_statistics": True}, True),
    "gradient_clipping": ({"gradient_clipping": 0.5}, 0.5),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, 4),
    "train_batch_size": ({"train_batch_size": 64}, 64),
    "train_micro_batch_size_per_gpu": ({"train_micro_batch_size_per_gpu": 2}, 2),
    "grad_accum_dtype": ({"data_types": {"grad_accum_dtype": "fp32"}}, "fp32"),
    "pipeline_stages": ({"pipeline": {"stages": 4}}, 4),
    **{
        name: ({"zero_optimization": {name: value}}, value)
        for name, value in {
            "stage": 3,
            "compute_grad_norm": False,
            "stage3_param_persistence_threshold": 8,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "overlap_comm": False,
            "mics_shard_size": 4,
            "zero_hpz_partition_size": 8,
            "sub_group_size": 1e6,
            "zero_quantized_weights": True,
            "zero_quantized_nontrainable_weights": True,
            "zero_quantized_weights_dtype": "float8_e4m3fn",
            "zero_quantized_gradients": True,
            "zero_quantized_gradients_dtype": "int4",
            "zero_quantized_block_size": 128,
        }.items()
    },
    "fp8": (
        {
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "fp8": {"enabled": True, "emulate": True},
        },
        Fp8Config(emulate=True),
    ),
    "offload_optimizer": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        OffloadOptimizer(ratio=0.5),
    ),
    "offload_param": (
        {
            "zero_optimization": {
                "offload_param": {"device": "nvme", "nvme_path": "/disk", "max_in_cpu": 1e6}
            }
        },
        OffloadParam(device="nvme", nvme_path="/disk", max_in_cpu=1_000_000),
    ),
    "partition_activations": ({"activation_checkpointing": {"partition_activations": True}}, True),
    "cpu_checkpointing": ({"activation_checkpointing": {"cpu_checkpointing": True}}, True),
    "xla": ({"xla": XLA_OPTIONS}, XLA_OPTIONS),
    "optimizer": (
        {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.95]}}},
        OptimizerConfig(type="Lion", params={"betas": (0.9, 0.95)}),
    ),
    "scheduler": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
        SchedulerConfig(type="WarmupLR", params={"warmup_num_steps": 7}),
    ),
    "steps_per_print": ({"steps_per_print": 3}, 3),
    "wall_clock_breakdown": ({"wall_clock_breakdown": True}, True),
    "tensorboard": (
        {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}},
        MonitorConfig(output_path="logs", job_name="run"),
    ),
    "csv_monitor": ({"csv_monitor": {"enabled": True}}, MonitorConfig()),
    "wandb": (
        {"wandb": {"enabled": True, "team": "llm", "project": "p"}},
        WandbConfig(team="llm", project="p"),
    ),
    "dump_state": ({"dump_state": True}, True),
    "autotuning": (
        {"autotuning": {"enabled": True, "metric": "latency", "max_train_batch_size": 64}},
        AutotuningConfig(metric="latency", max_train_batch_size=64),
    ),
}
# What a JSON has by default, and keywords do not.
QUIET = {"gradient_clipping": 0, "steps_per_print": 0}
NOT_IN_A_JSON = {"notes", "small_array_size"}
# What a field is refused without.
BESIDE = {
    "offload_optimizer": 1,
    "offload_param": 3,
    "zero_hpz_partition_size": 3,
    "zero_quantized_weights": 1,
    "zero_quantized_nontrainable_weights": 1,
    "zero_quantized_gradients": 1,
    "fp8": 3,
}


def test_every_field_is_here():
    assert set(FIELDS) == {f.name for f in dataclasses.fields(ZeroConfig)} - NOT_IN_A_JSON
    assert set(FIELDS) >= set(BY_FIELD)


@pytest.mark.parametrize("name", FIELDS)
def test_three_ways_to_say_it(name):
    json, value = FIELDS[name]
    beside = {"stage": BESIDE[name]} if name in BESIDE else {}
    also = {"bf16": True} if name == "fp8" else {}
    typed = ZeroConfig(**{name: value}, **beside, **also)
    zero = json.get("zero_optimization", {})
    mapping = json.get(name, zero.get(name)) if dataclasses.is_dataclass(value) else value
    assert getattr(typed, name) == value
    assert getattr(typed, name) != getattr(ZeroConfig(), name)
    assert load({**QUIET, **json, "zero_optimization": zero | beside}) == typed
    assert ZeroConfig.from_keywords(**{name: value}, **beside, **also) == typed
    assert ZeroConfig.from_keywords(**{name: mapping}, **beside, **also) == typed


def test_an_option_of_xla_may_be_a_keyword():
    for name, value in XLA_OPTIONS.items():
        config = ZeroConfig.from_keywords(**{name: value})
        assert (
            config == ZeroConfig(xla={name: value}) == ZeroConfig.from_keywords(xla={name: value})
        )
        assert config.xla == {name: value}


@pytest.mark.parametrize("section", ["tensorboard", "csv_monitor", "wandb"])
def test_a_monitor_is_off_unless_enabled(section):
    for given in ({}, {"enabled": False}, {"enabled": "auto"}):
        assert getattr(load({section: given}), section) is None
    idle = load({section: {"enabled": False, "job_name": "x", "output_path": "y"}})
    assert getattr(idle, section) is None
    assert {n.status for n in idle.notes if n.key.startswith(f"{section}.j")} == {"no effect"}
    assert getattr(ZeroConfig.from_keywords(**{section: {"enabled": False}}), section) is None
    assert getattr(ZeroConfig.from_keywords(**{section: {}}), section) is not None
