"""``transformers.TrainingArguments``, as objects and as dicts; no test needs transformers.

``data/their_arguments.json`` is the ``to_dict()`` of ``Seq2SeqTrainingArguments`` of transformers
5.24.
"""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jax
import pytest

import zerojax
from zerojax import TrainingArguments
from zerojax.config import ConfigError
from zerojax.trainer.arguments import OPTIMIZERS
from zerojax.trainer.other_arguments import OTHERS, OVERRIDDEN

THEIRS = json.loads((Path(__file__).parent / "data" / "their_arguments.json").read_text())


def their_class(**own_fields: Any) -> type:
    """A stand-in for a class of transformers, and one derived from it with fields of its own."""
    fields = [(name, object, dataclasses.field(default=None)) for name in THEIRS]
    base = dataclasses.make_dataclass(
        "TrainingArguments", fields, namespace={"to_dict": lambda self: dict(vars(self))}
    )
    base.__module__ = "transformers.training_args"
    derived = dataclasses.make_dataclass(
        "MyArguments", [(k, object, dataclasses.field(default=v)) for k, v in own_fields.items()],
        bases=(base,),
    )  # fmt: skip
    derived.__module__ = "__main__"
    return derived


def test_all_their_defaults_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = TrainingArguments(**THEIRS)
        converted = TrainingArguments.of(their_class()(**THEIRS))
    assert not caplog.records
    assert converted.given == {"output_dir"}
    differing = {k for k, v in vars(TrainingArguments()).items() if getattr(args, k) != v}
    assert differing == {"optim", "project", "given", "others"}
    assert OPTIMIZERS[args.optim] == OPTIMIZERS[TrainingArguments().optim]


def test_what_they_set_is_taken_and_fields_of_derived_classes_are_not() -> None:
    given = {"learning_rate": 1e-4, "max_grad_norm": 0.0, "remove_unused_columns": False,
             "eval_strategy": "steps", "do_eval": True, "dataloader_pin_memory": False}  # fmt: skip
    args = TrainingArguments.of(their_class(my_flag=True)(**THEIRS | given))
    assert args.given == {"output_dir", *given}
    assert {name: getattr(args, name) for name in given} == given


def test_another_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"neither zerojax\.TrainingArguments nor transformers\."):
        TrainingArguments.of({"output_dir": "out"})


def test_an_argument_parser_can_read_the_fields() -> None:
    """As ``transformers.HfArgumentParser`` does: one type an argument, no metadata."""
    hints = get_type_hints(TrainingArguments)
    for field in dataclasses.fields(TrainingArguments):
        if not field.init:
            continue
        assert not field.metadata
        kinds = {get_origin(t) or t for t in get_args(hints[field.name]) or [hints[field.name]]}
        is_text = field.name in {"deepspeed", "fsdp_config", "lr_scheduler_kwargs"}
        assert len(kinds - {type(None)}) == 1 or is_text
        assert not is_text or get_args(hints[field.name])[1] is str  # the parser's choice


def test_objects_may_be_strings_as_on_a_command_line() -> None:
    args = TrainingArguments(
        lr_scheduler_kwargs='{"num_cycles": 2}', deepspeed='{"zero_optimization": {"stage": 2}}'
    )
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.deepspeed == {"zero_optimization": {"stage": 2}}
    for text in ('{"num_cycles": 2', "num_cycles=2"):
        with pytest.raises(ConfigError, match="expected an object, or its JSON as a string"):
            TrainingArguments(lr_scheduler_kwargs=text)


def test_every_field_can_be_read() -> None:
    """Scripts end with ``if training_args.push_to_hub``, and their first log line has a device."""
    args = TrainingArguments("out", push_to_hub=False, hub_token="mine", dataloader_num_workers=4)
    assert (args.push_to_hub, args.hub_token, args.dataloader_num_workers) == (False, "mine", 4)
    for name in OTHERS:
        getattr(args, name)
    default = TrainingArguments("out")
    assert (default.hub_token, default.ddp_timeout, default.log_level) == (None, 1800, "passive")
    assert (default.local_rank, default.past_index) == (0, -1)
    assert default.device == jax.devices()[0]
    assert default.parallel_mode.value == "distributed"
    assert "others" not in default.to_dict()
    with pytest.raises(AttributeError, match="TrainingArguments has no attribute 'learning'"):
        default.learning  # noqa: B018


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_subclass_that_overrides_what_is_never_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name}: .* never calls it.*; pass Trainer\("):
        type("Mine", (zerojax.Trainer,), {name: lambda self: None})


def test_values_that_scripts_read() -> None:
    args = TrainingArguments("out", per_device_train_batch_size=2, deepspeed=Path("zero.json"))
    assert (args.world_size, args.process_index, args.local_process_index) == (8, 0, 0)
    assert (args.train_batch_size, args.should_save) == (16, True)
    assert args.get_process_log_level() == logging.INFO
    with args.main_process_first(desc="tokenize"):
        pass
    assert json.loads(args.to_json_string())["deepspeed"] == "zero.json"
    assert TrainingArguments(**args.to_dict()) == dataclasses.replace(args, deepspeed="zero.json")
