"""Arguments of Hugging Face's Trainer that have no effect in zerojax or that it refuses."""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zerojax.config.accelerate.keys import FSDP
from zerojax.config.accelerate.keys import KEYS as YAML_KEYS
from zerojax.config.errors import ConfigError, as_text, closest, hint
from zerojax.config.files import read_json
from zerojax.config.kinds import FLAG


class Other(NamedTuple):
    """An argument that zerojax does not read.

    Attributes:
      reason: Why it has no effect, or the alternative to it.
      accepted: The values that ask for nothing, if others are refused; None if any value is
        accepted and has no effect.
    """

    reason: str
    accepted: tuple[object, ...] | None = None


THEIR_DEFAULTS: dict[str, object] = {
    "accelerator_config": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "non_blocking": False,
        "gradient_accumulation_kwargs": None,
    },
    "average_tokens_across_devices": True,
    "dataloader_in_order": True,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "ddp_timeout": 1800,
    "eval_do_concat_batches": True,
    "hub_strategy": "every_save",
    "hub_token": "<HUB_TOKEN>",
    "include_num_input_tokens_seen": "no",
    "label_names": ["labels"],
    "local_rank": -1,
    "log_level": "passive",
    "log_level_replica": "warning",
    "log_on_each_node": True,
    "logging_nan_inf_filter": True,
    "metric_for_best_model": "loss",
    "optim": "adamw_torch_fused",
    "project": "huggingface",
    "remove_unused_columns": True,
    "skip_memory_metrics": True,
}
"""Defaults of transformers' ``TrainingArguments`` (5.24), as its ``to_dict`` returns them, that are
neither empty nor zerojax's own."""

_LOOP = "rows are read in the training process; a dataset of grain or datasets reads ahead itself"
_TORCH = "it steers PyTorch"
_XLA = "XLA compiles every step"
_LOGS = 'logging.getLogger("zerojax") has the level, and only process 0 logs'
_HUB = "nothing is pushed to a hub"
_PLACES = "a launcher or JAX_PLATFORMS chooses devices and processes"
_ALWAYS = "always so"

_WITHOUT_EFFECT = {
    name: Other(why)
    for names, why in (
        ("dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers "
         "dataloader_pin_memory dataloader_multiprocessing_context dataloader_in_order", _LOOP),
        ("gradient_checkpointing_kwargs activation_checkpointing_kwargs",
         "`use_reentrant` chooses between PyTorch's two ways"),
        ("torch_empty_cache_steps ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb "
         "ddp_broadcast_buffers ddp_timeout half_precision_backend fp16_backend fp16_opt_level "
         "use_legacy_prediction_loop ddp_static_graph jit_mode_eval use_ipex "
         "dispatch_batches split_batches", _TORCH),
        ("torch_compile torch_compile_backend torch_compile_mode torchdynamo", _XLA),
        ("use_liger_kernel liger_kernel_config", "the model chooses its kernels"),
        ("log_level log_level_replica log_on_each_node", _LOGS),
        ("logging_nan_inf_filter", "a loss that is not finite is logged as it is"),
        ("tf32", "jax.default_matmul_precision chooses the precision of float32 products"),
        ("local_rank use_cpu tpu_num_cores use_mps_device ray_scope xpu_backend", _PLACES),
        ("save_safetensors full_determinism average_tokens_across_devices "
         "enable_jit_checkpoint save_on_each_node", _ALWAYS),
        ("eval_accumulation_steps", "predictions go to host memory batch by batch"),
        ("skip_memory_metrics include_tokens_per_second include_num_input_tokens_seen "
         "tpu_metrics_debug", "the progress line has tokens/s and memory"),
        ("hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
         "push_to_hub_model_id push_to_hub_organization push_to_hub_token", _HUB),
        ("fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
         "every parameter is cut by itself, and no layer is wrapped"),
        ("trackio_space_id trackio_bucket_id trackio_static_space_id", "trackio is not written to"),
        ("generation_max_length generation_num_beams generation_config",
         "evaluations generate nothing"),
        ("use_cache", "a training step keeps no cache of keys and values"),
    )
    for name in names.split()
}  # fmt: skip
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "push_to_hub": ((False,), "save_model() writes a folder to push"),
    "auto_find_batch_size": ((False,), "`python -m zerojax fit` finds the batch that fits"),
    "neftune_noise_alpha": ((None,), "add the noise in loss="),
    "past_index": ((-1,), "no model here returns a past"),
    "adafactor": ((False,), 'optim="adafactor" does so'),
    "optim_target_modules": ((None,), "Trainer(optimizer=...) takes any optax optimizer"),
    "bf16_full_eval": ((False,), "bf16=True evaluates in bfloat16, too"),
    "fp16_full_eval": ((False,), "fp16=True evaluates in float16, too"),
    "save_only_model": ((False,), "checkpoints have the optimizer's state; save_model() has not"),
    "ignore_data_skip": ((False,), "a resumed run reads from the row after its last one"),
    "restore_callback_states_from_checkpoint": ((False,), "callbacks keep no state"),
    "batch_eval_metrics": ((False,), "compute_metrics gets all rows at once"),
    "eval_do_concat_batches": ((True,), "predictions are joined"),
    "eval_use_gather_object": ((False,), "predictions are arrays"),
    "include_inputs_for_metrics": ((False,), "return inputs from loss= beside `loss`"),
    "include_for_metrics": (([], (), None), "return them from loss= beside `loss`"),
    "accelerator_config": (
        (None, THEIR_DEFAULTS["accelerator_config"]),
        "zerojax's loop has no Accelerator; remove it",
    ),
    "predict_with_generate": ((False,), "generate with zerojax.generation.beam_search"),
    "sortish_sampler": ((False,), 'train_sampling_strategy="group_by_length" sorts by length'),
    "parallelism_config": ((None,), "Trainer(mesh=..., specs=...) takes a mesh and what it cuts"),
    "debug": (("", [], ()), "`python -m zerojax report` and JAX's own switches find faults"),
}
OTHERS: dict[str, Other] = _WITHOUT_EFFECT | {
    name: Other(why, accepted) for name, (accepted, why) in _REFUSED.items()
}
"""The arguments of transformers that zerojax does not read."""


def their_default(name: str) -> object:
    """Returns transformers' default of one of :data:`OTHERS`."""
    if name == "hub_token":  # to_dict hides it
        return None
    return THEIR_DEFAULTS.get(name, (OTHERS[name].accepted or (None,))[0])


def is_default(name: str, value: object) -> bool:
    """Returns whether an argument has transformers' default, which asks for nothing."""
    if name in THEIR_DEFAULTS:
        return value in (THEIR_DEFAULTS[name], None)
    return value is None or value is False or value in ([], {}, "")


def sort_out(
    given: Mapping[str, object], others: Mapping[str, Other], own: Iterable[str], of: str = ""
) -> tuple[list[str], list[str]]:
    """Returns a problem for each argument that is unknown or refused; and the name of each one
    without effect, with the reason.

    Args:
      given: Arguments that zerojax does not read.
      others: What becomes of those that are known.
      own: The names that zerojax reads.
      of: The object that has them as keys; "" for arguments.
    """
    problems, unused, kind = list[str](), list[str](), "key" if of else "argument"
    for name, value in given.items():
        label = f"{of}.{name}" if of else name
        if (other := others.get(name)) is None:
            remedy = hint(closest(name, [*own, *others]), "remove it")
            problems.append(f"{label}: unknown {kind}; {remedy}")
        elif other.accepted is not None and value not in other.accepted:
            problems.append(f"{label} = {as_text(value)} is not supported: {other.reason}")
        elif other.accepted is None and not is_default(name, value):
            unused.append(f"{label} ({other.reason})")
    return problems, unused


RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
}
"""Current names of renamed arguments, by old name."""

OF_TRAINER: dict[str, str] = {
    **dict.fromkeys(("feature_extractor", "image_processor"), "pass it as processing_class="),
    "optimizers": "optimizer= takes an optax transformation, with its schedule inside",
    "optimizer_cls_and_kwargs": "optimizer= takes an optax transformation",
    "model_init": "model= takes a module, or a function from rngs to an NNX module",
    "compute_loss_func": "loss= takes a function (model, batch) -> loss",
}
"""Alternatives to parameters of Hugging Face's ``Trainer``."""

_OPTIMIZER = "pass Trainer(optimizer=...), an optax transformation with its schedule inside"
_ROWS = "pass Trainer(train_dataset=..., eval_dataset=..., data_collator=...)"
OVERRIDDEN: dict[str, str] = {
    **dict.fromkeys(("compute_loss", "training_step", "prediction_step"),
                    "pass Trainer(loss=...), a function (model, batch) -> loss, predictions"),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler",
                     "get_decay_parameter_names", "optimizer_step"), _OPTIMIZER),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader",
                     "_get_train_sampler", "_get_eval_sampler", "_prepare_inputs"), _ROWS),
    "evaluation_loop": "pass Trainer(compute_metrics=..., preprocess_logits_for_metrics=...)",
    "prediction_loop": "pass Trainer(compute_metrics=..., preprocess_logits_for_metrics=...)",
    "log": "pass Trainer(callbacks=...), a TrainerCallback with on_log",
    **dict.fromkeys(("_save", "_save_checkpoint"),
                    "pass Trainer(callbacks=...), a TrainerCallback with on_save"),
}  # fmt: skip
"""Alternatives to methods of Hugging Face's ``Trainer`` that subclasses override there."""


def refuse_overrides(subclass: type) -> None:
    """Refuses a subclass of ``Trainer`` with a method that only Hugging Face's ``Trainer`` calls.

    Raises:
      TypeError: The class defines such a method.
    """
    for name in vars(subclass):
        if name in OVERRIDDEN:
            raise TypeError(
                f"{subclass.__name__}.{name}: the Trainer never calls it; {OVERRIDDEN[name]}"
            )


def refuse(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuses parameters that ``Trainer`` does not have.

    Raises:
      TypeError: Such a parameter was passed; None is accepted for those of :data:`OF_TRAINER`.
    """
    for name, value in given.items():
        if name in OF_TRAINER and value is None:
            continue
        reason = OF_TRAINER.get(name) or hint(closest(name, [*known]), "remove it")
        problem = "not supported" if name in OF_TRAINER else "unknown argument"
        raise TypeError(f"Trainer: {name}: {problem}; {reason}")


_REMAT = ("activation_checkpointing", "xla_fsdp_grad_ckpt")
_OF_YAML = {
    key.removeprefix(f"{FSDP}.fsdp_"): Other(
        row.why, (row.default, *row.accepts) if row.treatment == "off only" else None
    )
    for key, row in YAML_KEYS.items()
    if key.startswith(f"{FSDP}.fsdp_")  # those that Accelerate reads follow
}
_IN_FSDP = {
    **_OF_YAML,
    **dict.fromkeys(("limit_all_gathers", "xla", "xla_fsdp_settings", "xla_fsdp_v2"), Other(_XLA)),
    "offload_params": Other('fsdp="full_shard offload" does so', (False, None)),
    "reshard_after_forward": Other('fsdp="shard_grad_op" keeps gathered parameters', (True, None)),
    "version": Other("both forms are read", (1, 2)),
    "sharding_strategy": Other("fsdp has its name", (None,)),
    "activation_checkpointing_offload": Other(
        'give deepspeed={"activation_checkpointing": {"cpu_checkpointing": true}} instead',
        (False, None),
    ),
}
"""Keys of ``fsdp_config`` that zerojax does not read."""


class FsdpOptions(NamedTuple):
    """Parsed ``fsdp_config``.

    Attributes:
      remat: True if the backward pass recomputes blocks.
      unused: The name of each key without effect, with the reason.
      problems: A line for each invalid key.
    """

    remat: bool
    unused: list[str]
    problems: list[str]


def fsdp_options(
    given: str | os.PathLike[str] | Mapping[str, object] | None,
) -> FsdpOptions:
    """Parses ``fsdp_config``; Accelerate's YAML has its keys with the prefix ``fsdp_``.

    Args:
      given: A path or a dict; None for no options.

    Example:
      >>> fsdp_options({"activation_checkpointing": True, "use_orig_params": True}).remat
      True
    """
    raw, unread = read_json(given) if given is not None else ({}, [])
    options, remat = {name.removeprefix("fsdp_"): value for name, value in raw.items()}, False
    problems = [f"fsdp_config: {text}" for text in unread]
    for name in _REMAT:
        try:
            remat |= FLAG.check(options.pop(name, False))
        except ConfigError as error:
            problems.append(f"fsdp_config.{name}: {error}")
    wrong, unused = sort_out(options, _IN_FSDP, _REMAT, "fsdp_config")
    return FsdpOptions(remat, unused, problems + wrong)
