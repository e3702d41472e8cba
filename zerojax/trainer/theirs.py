"""``transformers.TrainingArguments``, read without importing transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def set_arguments(given: object) -> dict[str, Any] | None:
    """Returns the arguments that differ from transformers' defaults, by name.

    Fields of classes outside transformers are left out.

    Args:
      given: Any object.

    Returns:
      The arguments; None if the object is not a ``transformers.TrainingArguments``.
    """
    classes = [c for c in type(given).__mro__ if c.__module__.partition(".")[0] == "transformers"]
    if not any(c.__name__ == "TrainingArguments" for c in classes):
        return None
    theirs: Any = given
    values: dict[str, Any] = theirs.to_dict()
    names = {
        field.name
        for c in classes
        if dataclasses.is_dataclass(c)
        for field in dataclasses.fields(c)
    }
    return {
        name: value
        for name, value in values.items()
        if name in names and not is_default(name, value)
    }


def is_default(name: str, value: object) -> bool:
    """Returns whether an argument has transformers' default, which asks for nothing."""
    if name in THEIR_DEFAULTS:
        return value in (THEIR_DEFAULTS[name], None)
    return value is None or value is False or value in ([], {}, "")
