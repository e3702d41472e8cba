"""The user's optimizer beside arguments that it replaces."""

import json
from pathlib import Path
from typing import Any

import optax

import zerojax
from zerojax import TrainingArguments
from zerojax.config import ConfigError
from zerojax.trainer.optimizer import optimizer_of

THEIRS = json.loads((Path(__file__).parent / "data" / "their_arguments.json").read_text())
SET: dict[str, Any] = {
    "learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.99,
    "adam_epsilon": 1e-6, "optim": "sgd", "optim_args": "momentum=0.9",
    "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}, "warmup_steps": 5,
    "warmup_ratio": 0.1,
}  # fmt: skip


def problems(**arguments: Any) -> list[str]:
    """Those of arguments beside an optimizer of the user's."""
    try:
        optimizer_of(TrainingArguments(**arguments), zerojax.zero(), 10, optax.sgd(0.1))
    except ConfigError as error:
        return [*error.problems]
    return []


def test_each_that_is_set_and_has_no_effect_is_named() -> None:
    found = problems(**SET)
    assert [problem.partition(" = ")[0] for problem in found] == [*SET]
    assert found[0].startswith("learning_rate = 0.001 has no effect on your transformation")


def test_defaults_pass_as_a_parser_of_a_command_line_writes_them() -> None:
    assert not problems(**TrainingArguments().to_dict())
    assert not problems(**THEIRS, warmup_ratio=None)
    assert not problems(max_grad_norm=0.5, lr_scheduler_kwargs={})
