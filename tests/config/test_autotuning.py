"""`autotuning`, `activation_checkpointing`, `dump_state`, and reports without effect."""

import logging

import pytest

import zerojax
from zerojax.config import ConfigError, load
from zerojax.config.frozen import quiet
from zerojax.config.keys import KEYS
from zerojax.config.resolved import resolved
from zerojax.config.settings import BY_FIELD

# As DeepSpeed's tutorials write them.
REPORTS = {
    "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "detailed": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
    "memory_breakdown": True,
}
AUTOTUNING = {
    "enabled": True,
    "results_dir": "autotuning_results",
    "exps_dir": "autotuning_exps",
    "overwrite": False,
    "metric": "throughput",
    "start_profile_step": 10,
    "end_profile_step": 20,
    "fast": False,
    "max_train_batch_size": 4096,
    "mp_size": 1,
    "num_tuning_micro_batch_sizes": 3,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
    "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
}
BOUNDS = {"enabled", "metric", "max_train_batch_size", "num_tuning_micro_batch_sizes", "mp_size"}
ACTIVATION_CHECKPOINTING = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.mark.parametrize(
    ("section", "given", "honoured"),
    [
        ("autotuning", AUTOTUNING, BOUNDS),
        (
            "activation_checkpointing",
            ACTIVATION_CHECKPOINTING,
            {"partition_activations", "cpu_checkpointing"},
        ),
    ],
)
def test_sections_as_tutorials_have_them(section, given, honoured):
    notes = {note.key: note for note in load({section: given}).notes}
    became = {name: notes[f"{section}.{name}"] for name in given}
    assert {name for name, note in became.items() if note.status == "honoured"} == honoured
    assert all(note.reason for note in became.values())


def test_off_sections_set_nothing():
    off = {"autotuning": {**AUTOTUNING, "enabled": False}}
    assert load(off) == load({})
    assert {n.status for n in load(off).notes if n.key.endswith("metric")} == {"no effect"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"autotuning": {"mp_size": 2}}, "autotuning.mp_size = 2 is not supported: fit searches"),
        (
            {"autotuning": {"enabled": True, "min_train_batch_size": 9, "max_train_batch_size": 8}},
            "autotuning.min_train_batch_size = 9 is above max_train_batch_size = 8",
        ),
    ],
)
def test_bad_values(config, says):
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert says in str(caught.value)


def test_a_quiet_config_tells_nothing():
    loud = load({"dump_state": True, "autotuning": {"enabled": True}})
    assert quiet(loud) == load({}) != loud


def test_reports_name_what_prints_them():
    config = load(REPORTS)
    reasons = {note.key: note.reason for note in config.notes if note.status == "no effect"}
    assert "`python -m zerojax plan`" in reasons["flops_profiler"]
    assert "train_step.collectives(state, batch)" in reasons["comms_logger"]
    assert "`python -m zerojax plan`" in reasons["memory_breakdown"]
    assert config == load({})


def test_tuning_is_a_run_of_its_own():
    with pytest.raises(ConfigError, match=r"autotuning.enabled .*`python -m zerojax fit --config"):
        zerojax.zero({"autotuning": AUTOTUNING})


def test_activations_are_cut_over_no_axis_of_the_users():
    config = {"activation_checkpointing": {"partition_activations": True}}
    assert zerojax.zero(config, mesh=zerojax.mesh(replicas=2)).config.partition_activations
    mesh = zerojax.mesh(axes={"data": 4, "model": 2})
    with pytest.raises(ConfigError, match=r"partition_activations = true: .*with_sharding_constr"):
        zerojax.zero(config, mesh=mesh)


def test_the_state_is_dumped_once(caplog):
    caplog.set_level(logging.INFO, "zerojax")
    given = {"dump_state": True, "train_batch_size": 16, "optimizer": {"type": "Lion"}}
    zero = zerojax.zero({**given, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})
    (record,) = caplog.records
    lines = dict(line.split(maxsplit=1) for line in record.getMessage().splitlines()[1:])
    assert (lines["zero_optimization.stage"], lines["gradient_clipping"]) == ("2", "1.0")
    assert lines["train_micro_batch_size_per_gpu"] == "2"
    assert lines["optimizer.type"] == '"Lion"'
    assert "reduce_bucket_size = 500000000" in lines["without"]
    held = {key for key in lines if key in KEYS}
    assert held >= {key.path for key in BY_FIELD.values()}
    assert resolved(zero.config, 8) in record.getMessage()
