"""What a DeepSpeed JSON becomes beside the arguments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zerojax import TrainingArguments
from zerojax.config import ConfigError, load
from zerojax.trainer.resolved import resolved

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
PRINTED = Path(__file__).parents[3] / "shared" / "guides"
# What the guides pass beside their files; the devices on which the file's batch multiplies out.
GUIDES: dict[str, tuple[dict[str, Any], int]] = {
    "llm_zero2_fp16": (
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, fp16=True,
             num_train_epochs=3, logging_steps=100, save_steps=1000), 8),
    "llm_zero3_offload": (
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, fp16=True,
             num_train_epochs=3, logging_steps=100, save_steps=1000), 8),
    "trainer_zero3_bf16": (
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=3,
             bf16=True, gradient_checkpointing=True,
             gradient_checkpointing_kwargs={"use_reentrant": False}, logging_steps=10,
             save_strategy="steps", save_steps=500), 4),
    "trainer_7b_offload": (
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=8, bf16=True), 8),
    "trainer_fp16": (dict(fp16=True), 4),
}  # fmt: skip


def printed(name: str) -> str:
    path = PRINTED / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return str(path)


def test_every_auto_becomes_what_the_arguments_say() -> None:
    args = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=3, bf16=True,
        learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6,
        max_grad_norm=0.5, warmup_ratio=0.1, deepspeed=AUTO,
    )  # fmt: skip
    config = load(resolved(args, world=4, steps=95, hidden_size=64))
    assert config.batch(4) == (24, 2, 3)
    assert (config.bf16, config.fp16, config.gradient_clipping) == (True, False, 0.5)
    assert config.stage3_param_persistence_threshold == 640
    assert config.optimizer is not None
    assert config.optimizer.params == {
        "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1,
    }  # fmt: skip
    assert config.scheduler is not None
    assert config.scheduler.params == {
        "warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 95,
    }  # fmt: skip
    assert AUTO["train_batch_size"] == "auto"  # the caller's dict is as before


def test_what_the_json_leaves_out_is_the_arguments() -> None:
    json = {"optimizer": {"type": "Lion"}, "scheduler": {"type": "WarmupLR"}}
    args = TrainingArguments("out", fp16=True, max_grad_norm=2.0, warmup_steps=5, deepspeed=json)
    config = load(resolved(args, world=2, steps=10))
    assert (config.fp16, config.gradient_clipping, config.batch(2).train) == (True, 2.0, 16)
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 5e-5
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_num_steps"] == 5


@pytest.mark.parametrize(
    ("json", "says"),
    [
        ({"gradient_clipping": 0.5},
         "gradient_clipping = 0.5, but TrainingArguments say max_grad_norm = 1.0 (the default)"),
        ({"train_batch_size": 64},
         "train_batch_size = 64, but TrainingArguments say 16 (per_device_train_batch_size = 8, "
         "gradient_accumulation_steps = 1)"),
        ({"bf16": {"enabled": "true"}},
         'bf16.enabled = "true", but TrainingArguments say bf16 = false (the default)'),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9, 0.95]}}},
         "[0.9, 0.999] (adam_beta1 = 0.9, adam_beta2 = 0.999)"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 300}}},
         "scheduler.params.total_num_steps = 300, but TrainingArguments say 10"),
        ({"gradient_cliping": 1.0}, "did you mean `gradient_clipping`?"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(json: dict[str, Any], says: str) -> None:
    args = TrainingArguments("out", deepspeed=json)
    with pytest.raises(ConfigError) as raised:
        load(resolved(args, world=2, steps=10))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "differing"),
    [
        ("Lion", {"optim": "adamw_torch_fused"}, []),  # the default of transformers
        ("Adam", {"optim": "adamw_apex_fused"}, []),
        ("AdamW", {"optim": "adafactor"}, ['optim = "adafactor"']),
        ("Lion", {"optim": "adamw_apex_fused"}, ['optim = "adamw_apex_fused"']),
        ("SGD", {"optim": "sgd", "optim_args": "momentum=0.9"}, ['optim_args = "momentum=0.9"']),
        ("Lion", {"optim": "sgd", "optim_args": "momentum=0.9"},
         ['optim = "sgd"', 'optim_args = "momentum=0.9"']),
    ],
)  # fmt: skip
def test_an_optimizer_that_the_json_would_replace(
    kind: str, arguments: dict[str, Any], differing: list[str]
) -> None:
    args = TrainingArguments("out", deepspeed={"optimizer": {"type": kind}}, **arguments)
    try:
        resolved(args, world=2, steps=10)
        problems: Sequence[str] = ()
    except ConfigError as error:
        problems = error.problems
    assert [*problems] == [
        f'optimizer.type = "{kind}", but TrainingArguments say {each}; remove {each.split()[0]}, '
        "or the JSON's `optimizer`"
        for each in differing
    ]


def test_without_a_json() -> None:
    alone = load(resolved(TrainingArguments("out", bf16=True), world=2, steps=10))
    assert (alone.stage, alone.bf16, alone.skips_overflow) == (0, True, False)
    fsdp = TrainingArguments("out", fsdp="full_shard offload auto_wrap", fp16=True)
    config = load(resolved(fsdp, world=2, steps=10))
    assert config.stage == 3
    assert config.offload_param is not None
    assert (config.loss_scale_window, config.hysteresis) == (2000, 1)


def test_monitors() -> None:
    args = TrainingArguments("out", report_to=["csv", "wandb"], run_name="a", project="p")
    config = load(resolved(args, world=1, steps=1))
    assert config.csv_monitor is not None
    assert (config.csv_monitor.output_path, config.csv_monitor.job_name) == ("out/runs", "a")
    assert config.wandb is not None
    assert config.wandb.project == "p"


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_resolves_verbatim(name: str) -> None:
    arguments, world = GUIDES[name]
    args = TrainingArguments("./results", deepspeed=printed(name), **arguments)
    config = load(resolved(args, world=world, steps=30, hidden_size=32))
    assert config.compute_dtype == ("bf16" if args.bf16 else "fp16")
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    assert config.batch(world).train == rows
