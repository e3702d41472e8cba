"""Keys of what is printed, timed and written."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.errors import shown
from zerojax.config.kinds import FLAG, INTEGER, NUMBER, TEXT, WHOLE, Kind, choice, optional
from zerojax.config.row import ANYTHING, FLAG_OFF, TEXT_OR_NULL, Key, honoured, switched, taken

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


def reports() -> Iterator[Key]:
    yield from honoured(
        "steps_per_print",
        optional(WHOLE),
        None,
        field="steps_per_print",
        auto="off: not asked for",
        why="a line is printed every so many updates; 0 or null prints none",
    )
    yield from honoured(
        "wall_clock_breakdown",
        FLAG,
        False,
        field="wall_clock_breakdown",
        auto="off: not asked for",
        why="true: the time of a step, blocked on the device, is told with each line",
    )
    yield from taken(
        "",
        "no effect",
        "train_step.lower(...).compile().memory_analysis() has the bytes before the run",
        memory_breakdown=FLAG_OFF,
    )
    yield from taken(
        "", "no effect", "`python -m zerojax explain` shows the config", dump_state=FLAG_OFF
    )
    yield from taken(
        "",
        "no effect",
        "it sets DeepSpeed's own logger",
        log_level=(choice("info", "debug", "warning", "error", "critical"), "info"),
    )
    yield from taken(
        "timers.throughput",
        "no effect",
        "wall_clock_breakdown times the steps",
        enabled=(FLAG, True),
        synchronized=(FLAG, True),
    )
    for section in ("tensorboard", "csv_monitor"):
        yield from _monitor(section, output_path=(TEXT, ""), job_name=(TEXT, "DeepSpeedJobName"))
    yield from _monitor("wandb", group=TEXT_OR_NULL, team=TEXT_OR_NULL, project=(TEXT, "deepspeed"))
    yield from taken(
        "wandb",
        "no effect",
        "wandb tells runs apart by group, team and project",
        output_path=TEXT_OR_NULL,
        job_name=TEXT_OR_NULL,
    )
    free = (ANYTHING, None)
    instead = "use tensorboard, csv_monitor or wandb"
    yield from switched("comet", instead, **dict.fromkeys(_COMET, free))
    yield from switched("trackio", instead, project=free)
    yield from switched(
        "comms_logger",
        "read the collectives in the compiled text: train_step.lower(...).compile().as_text()",
        verbose=FLAG_OFF,
        prof_all=(FLAG, True),
        debug=FLAG_OFF,
        prof_ops=(ANYTHING, []),
    )
    yield from switched(
        "flops_profiler",
        "use jax.profiler, or cost_analysis() of the compiled step",
        profile_step=(WHOLE, 1),
        module_depth=(INTEGER, -1),
        top_modules=(WHOLE, 1),
        detailed=(FLAG, True),
        output_file=TEXT_OR_NULL,
        recompute_fwd_factor=(NUMBER, 0.0),
    )


def _monitor(section: str, **rows: tuple[Kind, Any]) -> Iterator[Key]:
    why = f"true: metrics are written to {section}"
    yield from honoured(f"{section}.enabled", FLAG, False, auto="off: not asked for", why=why)
    for name, (kind, default) in rows.items():
        auto, why = f"DeepSpeed's default, {shown(default)}", f"for {section}"
        yield from honoured(f"{section}.{name}", kind, default, auto=auto, why=why)
