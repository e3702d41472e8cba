"""Loss scales, windows and switches that cannot be, from JSON and from keywords alike."""

import math

import pytest

from zerojax.config import ConfigError, ZeroConfig, load

NAN, INF = math.nan, math.inf
NEVER = (True, "16", None, NAN, INF)
NUMBERS = {
    "loss_scale": (*NEVER, -1, 1e39),
    "min_loss_scale": (*NEVER, 0, 1e-39),
    "initial_scale_power": (*NEVER, 1.5, 128),
    "loss_scale_window": (*NEVER, 0, 2**31),
    "hysteresis": (*NEVER, 0, 2**31),
}
FLAGS = ("enabled", "auto_cast", "consecutive_hysteresis", "raise_error_at_min_scale")
WRONG = [(name, value) for name, values in NUMBERS.items() for value in values]
WRONG += [(name, value) for name in FLAGS for value in (1, "yes", None)]


def refusals(section: str, name: str, value: object) -> list[str]:
    """What the JSON and the keyword of one key are told."""
    told = []
    with pytest.raises(ConfigError) as caught:
        load({section: {"enabled": True, name: value}})
    told += caught.value.problems
    field = name if name != "enabled" else section
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_keywords(**{section: True, field: value})
    told += caught.value.problems
    return told


def test_wrong_in_itself():
    for name, value in WRONG:
        from_json, from_keyword = refusals("fp16", name, value)
        assert from_json.startswith(f"fp16.{name}: expected ")
        assert from_json.partition(".")[2].partition(":")[2] == from_keyword.partition(":")[2]


def test_fp16_with_bf16():
    says = "bfloat16 and fp16 modes cannot be simultaneously enabled"
    with pytest.raises(ConfigError, match=f"{says}; set fp16.enabled or bf16.enabled to false"):
        load({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match=f"{says}; set fp16 or bf16 to false"):
        ZeroConfig.from_keywords(fp16=True, bf16=True)


def test_min_loss_scale_above_the_initial_scale():
    says = r"min_loss_scale = 8.0 is above the initial scale, 2\*\*.*initial_scale_power = 4; "
    with pytest.raises(ConfigError, match=r"^fp16\." + says + "lower it, or raise the power"):
        load({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}})
    with pytest.raises(ConfigError, match="^" + says):
        ZeroConfig.from_keywords(fp16=True, initial_scale_power=2, min_loss_scale=8)
    with pytest.raises(ConfigError, match="65536"):
        ZeroConfig(fp16=True, min_loss_scale=65537)
    # A static scale never moves, so neither number is read.
    assert ZeroConfig(fp16=True, loss_scale=4, initial_scale_power=2, min_loss_scale=8).fp16


@pytest.mark.parametrize(
    ("section", "given", "says"),
    [
        ("optimizer", {"type": "Adafactor"}, "optimizer.type: unknown .*known: Adam, AdamW"),
        ("scheduler", {"type": "WarmUpCosin"}, 'scheduler.type: .*did you mean "WarmupCosineLR"'),
        *(
            (
                "scheduler",
                {"type": "WarmupLR", "params": {"warmup_num_steps": steps}},
                "scheduler.params.warmup_num_steps: expected an integer of at least 1",
            )
            for steps in (0, 1.5, True)
        ),
        (
            "scheduler",
            {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
            "scheduler.params.total_num_steps: missing; expected an integer",
        ),
    ],
)
def test_optimizers_and_schedules(section, given, says):
    with pytest.raises(ConfigError, match=says):
        load({section: given})
    with pytest.raises(ConfigError, match=says):
        ZeroConfig.from_keywords(**{section: given})


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"stage": 2, "zero_hpz_partition_size": 8},
            "zero_optimization.zero_hpz_partition_size = 8 needs stage 3, where parameters are "
            "sharded, and the stage is 2; set zero_optimization.stage to 3, or "
            "zero_optimization.zero_hpz_partition_size to 1",
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 8, "offload_optimizer": {"device": "cpu"}},
            "zero_optimization.zero_hpz_partition_size = 8 keeps a second shard of the parameters "
            "on the device, and zero_optimization.offload_optimizer.device has the state "
            "elsewhere; leave out one of them",
        ),
    ],
)
def test_partitions_without_what_they_need(section, says):
    with pytest.raises(ConfigError) as caught:
        load({"zero_optimization": section})
    assert caught.value.problems == (says,)


IN_FP8 = {"bf16": {"enabled": True}, "fp8": {"enabled": True}}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"zero_quantized_weights": True}, "zero_quantized_weights = true; set it to false"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients = true; set it to false"),
        ({"offload_param": {"device": "cpu"}}, 'offload_param.device = "cpu"; set it to "none"'),
        ({"offload_optimizer": {"device": "cpu"}}, 'device = "cpu"; set it to "none"'),
        ({"zero_hpz_partition_size": 4}, "zero_hpz_partition_size = 4; set it to 1"),
        ({"stage3_max_live_parameters": 1e9}, "max_live_parameters = 1000000000; set it to 0"),
    ],
)
def test_fp8_beside_what_it_excludes(section, says):
    with pytest.raises(ConfigError) as caught:
        load({**IN_FP8, "zero_optimization": {"stage": 3, **section}})
    (problem,) = caught.value.problems
    assert problem.startswith("fp8.enabled: products in fp8 are not supported with zero_optimiza")
    assert problem.endswith(f"{says}, or leave out fp8")


def test_fp8_without_what_it_needs():
    with pytest.raises(ConfigError) as caught:
        load({"fp8": {"enabled": True}, "fp16": {"enabled": True}})
    assert caught.value.problems == (
        "fp8.enabled: products in fp8 need bf16, in which everything else computes; set "
        "bf16.enabled to true and fp16.enabled to false, or leave out fp8",
        "fp8.enabled: products in fp8 read gathered codes, for which parameters must be sharded, "
        "and the stage is 0; set zero_optimization.stage to 3, or leave out fp8",
    )
    with pytest.raises(ConfigError, match=r"pipeline.stages = 2; set it to null, or leave out"):
        load({**IN_FP8, "zero_optimization": {"stage": 3}, "pipeline": {"stages": 2}})
    assert ZeroConfig.from_keywords(fp8=False).fp8 is None
    with pytest.raises(ConfigError, match=r'fp8: expected Fp8Config, .*, True, "emulate" or None'):
        ZeroConfig.from_keywords(stage=3, bf16=True, fp8="e4m3")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"stage": 0, "zero_quantized_weights": True},
            "zero_optimization.zero_quantized_weights = true needs stage 1, 2 or 3, where "
            "parameters are gathered and gradients reduced, and the stage is 0; set "
            "zero_optimization.stage to 1, or zero_optimization.zero_quantized_weights to false",
        ),
        (
            {"stage": 3, "zero_quantized_gradients_dtype": "int3"},
            'zero_optimization.zero_quantized_gradients_dtype: expected one of "int8", "int4", '
            'got "int3"',
        ),
        (
            {
                "stage": 3,
                "zero_quantized_gradients": True,
                "zero_quantized_gradients_dtype": "int4",
                "zero_quantized_block_size": 255,
            },
            "zero_optimization.zero_quantized_block_size = 255: blocks of int4 take an even number "
            "of elements; set 256, or zero_optimization.zero_quantized_gradients_dtype to int8",
        ),
    ],
)
def test_quantized_collectives_without_what_they_need(section, says):
    with pytest.raises(ConfigError) as caught:
        load({"zero_optimization": section})
    assert caught.value.problems == (says,)


@pytest.mark.parametrize(("devices", "known"), [(4, "1, 2, 4"), (12, "1, 2, 3, 4, 6, 12")])
def test_partitions_that_do_not_divide_the_devices(devices, known):
    config = load({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})
    with pytest.raises(ConfigError, match=f"does not divide the {devices} .* one of {known}: "):
        config.check_partition(devices)
    for size in (0, 1, 2, devices):
        load({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}).check_partition(
            devices
        )
