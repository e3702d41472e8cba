"""The arguments: their defaults, those without effect, those that are wrong."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from zerojax import TrainingArguments
from zerojax.config import ConfigError
from zerojax.trainer.other_arguments import OTHERS

# `dataclasses.fields(transformers.TrainingArguments)` of transformers 5.23, by their defaults.
DEFAULTS: dict[str, Any] = dict(
    per_device_train_batch_size=8, num_train_epochs=3.0, max_steps=-1, learning_rate=5e-5,
    lr_scheduler_type="linear", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999,
    adam_epsilon=1e-8, gradient_accumulation_steps=1, max_grad_norm=1.0, bf16=False, fp16=False,
    logging_strategy="steps", logging_steps=500, logging_first_step=False, eval_strategy="no",
    eval_steps=None, eval_delay=0, per_device_eval_batch_size=8, prediction_loss_only=False,
    eval_on_start=False, save_strategy="steps", save_steps=500, save_total_limit=None,
    load_best_model_at_end=False, seed=42, data_seed=None, dataloader_drop_last=False,
    remove_unused_columns=True, deepspeed=None,
)  # fmt: skip
THEIRS = """
optim_args optim_target_modules average_tokens_across_devices label_smoothing_factor bf16_full_eval
fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile
torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size log_on_each_node
logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica trackio_space_id
trackio_bucket_id trackio_static_space_id eval_do_concat_batches eval_use_gather_object
eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_on_each_node
enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
hub_always_push hub_revision ignore_data_skip restore_callback_states_from_checkpoint
full_determinism use_cpu accelerator_config parallelism_config dataloader_num_workers
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy length_column_name
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
ddp_timeout fsdp_config debug skip_memory_metrics do_train do_eval do_predict
resume_from_checkpoint local_rank
"""


def fsdp_config(**options: Any) -> dict[str, Any]:
    return {"fsdp": "full_shard", "fsdp_config": options}


def test_defaults_are_those_of_transformers() -> None:
    args = TrainingArguments("out")
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS


def test_every_argument_of_transformers_is_known() -> None:
    own = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(THEIRS.split()) <= {*OTHERS, *own}


def test_one_without_effect_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TrainingArguments(
            "out", gradient_checkpointing=True, dataloader_num_workers=4,
            gradient_checkpointing_kwargs={"use_reentrant": False}, eval_steps=10,
        )  # fmt: skip
    (record,) = caplog.records
    text = record.getMessage()
    assert "dataloader_num_workers" in text
    assert "gradient_checkpointing_kwargs" in text
    assert 'eval_steps (eval_strategy is "no")' in text


def test_checkpointing_of_fsdp_is_the_models_remat(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    given = {"fsdp_activation_checkpointing": True, "backward_prefetch": "backward_pre",
             "transformer_layer_cls_to_wrap": ["Block"], "xla": False}  # fmt: skip
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(given))
    for options in (given, file, str(file)):
        caplog.clear()
        args = TrainingArguments("out", fsdp="full_shard", fsdp_config=options)
        assert args.gradient_checkpointing
        (record,) = caplog.records
        assert "transformer_layer_cls_to_wrap (nothing is wrapped" in record.getMessage()
        assert "backward_prefetch (every step is one compiled" in record.getMessage()
        assert "activation_checkpointing" not in record.getMessage()
    assert TrainingArguments("out", fsdp="full_shard", fsdp_config={
        "xla_fsdp_grad_ckpt": True}).gradient_checkpointing  # fmt: skip
    assert not TrainingArguments("out", fsdp_config=given).gradient_checkpointing
    assert "fsdp_config (fsdp is not given)" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rat": 1}, "learning_rat: unknown argument; did you mean `learning_rate`?"),
        ({"learning_rate": "1e-4"}, "learning_rate: expected a finite number of at least 0, got"),
        ({"fp16": True, "bf16": True}, "bf16 and fp16 are both true"),
        ({"save_strategy": "best"}, 'save_strategy is "best" and eval_strategy "no"'),
        ({"push_to_hub": True}, "push_to_hub = true is not supported: save_model()"),
        ({"report_to": ["mlflow"]}, 'report_to: "mlflow" is none of tensorboard, wandb, csv'),
        ({"fsdp": "hybrid_shard"}, "mics_shard_size"),
        ({"fsdp": "full_shard", "deepspeed": {}}, "fsdp and deepspeed are both given"),
        (fsdp_config(activation_checkpoint=True), "did you mean `activation_checkpointing`?"),
        (fsdp_config(reshard_after_forward=False), 'fsdp="shard_grad_op" keeps'),
        ({"optim": "adamw_8bit"}, 'optim = "adamw_8bit" is not supported: "adamw_torch" keeps'),
        ({"optim": "ademamix"}, "Trainer(optimizer=optax.contrib.ademamix(...)) has it"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "did you mean `momentum`?"),
        ({"optim": "sgd", "optim_args": "momentum"}, "write name=value,name=value"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type: expected one of"),
        (
            {"load_best_model_at_end": True},
            'eval_strategy is "no", save_strategy "steps"; give both the same',
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 200},
            "save_steps = 500 is no multiple of eval_steps = 200",
        ),
    ],
)
def test_a_wrong_one_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TrainingArguments("out", **given)
    assert says in str(raised.value)


def test_old_names_and_lists() -> None:
    args = TrainingArguments("out", evaluation_strategy="epoch", report_to="none", label_names="y")
    assert (args.eval_strategy, args.report_to, args.label_names) == ("epoch", [], ["y"])
    assert TrainingArguments("out", report_to="csv tensorboard").report_to == ["csv", "tensorboard"]


def test_shares_of_all_steps() -> None:
    args = TrainingArguments("out", warmup_steps=0.1, logging_steps=0.25, eval_strategy="epoch")
    assert args.warmup(95) == 10
    assert TrainingArguments("out", warmup_steps=7, warmup_ratio=0.5).warmup(95) == 7
    every = [args.every(event, 90, 30) for event in ("logging", "eval", "save")]
    assert every == [23, 30, 500]
