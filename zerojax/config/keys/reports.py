"""Keys of what is printed, timed and written."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.errors import shown
from zerojax.config.keys.row import Key, honoured, no_effect, off_section
from zerojax.config.keys.value_kinds import (
    ANYTHING,
    FLAG,
    FLAG_OFF,
    INTEGER,
    NUMBER,
    TEXT,
    TEXT_OR_NULL,
    WHOLE,
    ValueKind,
    choice,
    optional,
)

_FREE: tuple[ValueKind, Any] = (ANYTHING, None)
_INSTEAD = "use tensorboard, csv_monitor or wandb"

_COMET = (
    "samples_log_interval",
    "project",
    "workspace",
    "api_key",
    "experiment_name",
    "experiment_key",
    "online",
    "mode",
)


def _monitor(section: str, **keys: tuple[ValueKind, Any]) -> Iterator[Key]:
    why = f"true: metrics are written to {section}"
    yield honoured(f"{section}.enabled", FLAG, False, auto="off: not asked for", why=why)
    for name, (kind, default) in keys.items():
        auto, why = f"DeepSpeed's default, {shown(default)}", f"for {section}"
        yield honoured(f"{section}.{name}", kind, default, auto=auto, why=why)


REPORTS: tuple[Key, ...] = (
    honoured(
        "steps_per_print",
        optional(WHOLE),
        None,
        field="steps_per_print",
        auto="off: not asked for",
        why="a line is printed every so many updates; 0 or null prints none",
    ),
    honoured(
        "wall_clock_breakdown",
        FLAG,
        False,
        field="wall_clock_breakdown",
        auto="off: not asked for",
        why="true: the time of a step, blocked on the device, is told with each line",
    ),
    *no_effect(
        "",
        "train_step.lower(...).compile().memory_analysis() has the bytes before the run",
        memory_breakdown=FLAG_OFF,
    ),
    *no_effect("", "`python -m zerojax explain` shows the config", dump_state=FLAG_OFF),
    *no_effect(
        "",
        "it sets DeepSpeed's own logger",
        log_level=(choice("info", "debug", "warning", "error", "critical"), "info"),
    ),
    *no_effect(
        "timers.throughput",
        "wall_clock_breakdown times the steps",
        enabled=(FLAG, True),
        synchronized=(FLAG, True),
    ),
    *_monitor("tensorboard", output_path=(TEXT, ""), job_name=(TEXT, "DeepSpeedJobName")),
    *_monitor("csv_monitor", output_path=(TEXT, ""), job_name=(TEXT, "DeepSpeedJobName")),
    *_monitor("wandb", group=TEXT_OR_NULL, team=TEXT_OR_NULL, project=(TEXT, "deepspeed")),
    *no_effect(
        "wandb",
        "wandb tells runs apart by group, team and project",
        output_path=TEXT_OR_NULL,
        job_name=TEXT_OR_NULL,
    ),
    *off_section("comet", _INSTEAD, **dict.fromkeys(_COMET, _FREE)),
    *off_section("trackio", _INSTEAD, project=_FREE),
    *off_section(
        "comms_logger",
        "read the collectives in the compiled text: train_step.lower(...).compile().as_text()",
        verbose=FLAG_OFF,
        prof_all=(FLAG, True),
        debug=FLAG_OFF,
        prof_ops=(ANYTHING, []),
    ),
    *off_section(
        "flops_profiler",
        "use jax.profiler, or cost_analysis() of the compiled step",
        profile_step=(WHOLE, 1),
        module_depth=(INTEGER, -1),
        top_modules=(WHOLE, 1),
        detailed=(FLAG, True),
        output_file=TEXT_OR_NULL,
        recompute_fwd_factor=(NUMBER, 0.0),
    ),
)
