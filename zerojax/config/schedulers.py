"""The named schedules of the JSON, with their parameters and DeepSpeed's defaults."""

from dataclasses import replace

from zerojax.config.family import REQUIRED, Family, Param
from zerojax.config.kinds import (
    AMOUNT,
    BETA,
    FLAG,
    INTEGER,
    NUMBER,
    POSITIVE,
    WHOLE,
    choice,
    optional,
)

_WARMUP_STEPS = Param(POSITIVE, 1000, loud=True)
_WARMUP_TYPE = Param(choice("log", "linear"), "log", loud=True)
_LAST = Param(INTEGER, -1, (-1,), "the step counter in the state says where a run resumes")
_TOTAL = Param(
    POSITIVE, REQUIRED, why="only the training loop knows how long it runs; write the number"
)
_MAX_LR = Param(optional(AMOUNT), None, auto="the optimizer's learning rate")
_CYCLE_LR = Param(AMOUNT, REQUIRED, why="DeepSpeed has no default for it; write the number")

SCHEDULERS: dict[str, Family] = {
    "WarmupLR": Family(
        {
            "warmup_min_lr": Param(AMOUNT, 0.0),
            "warmup_max_lr": _MAX_LR,
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "WarmupDecayLR": Family(
        {
            "total_num_steps": _TOTAL,
            "warmup_min_lr": Param(AMOUNT, 0.0),
            "warmup_max_lr": replace(_MAX_LR, default=1e-3, loud=True),
            "warmup_num_steps": _WARMUP_STEPS,
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "WarmupCosineLR": Family(
        {
            "total_num_steps": _TOTAL,
            "warmup_min_ratio": Param(AMOUNT, 0.0),
            "warmup_num_steps": _WARMUP_STEPS,
            "cos_min_ratio": Param(AMOUNT, 1e-4, loud=True),
            "warmup_type": _WARMUP_TYPE,
            "last_batch_iteration": _LAST,
        }
    ),
    "OneCycle": Family(
        {
            "cycle_min_lr": _CYCLE_LR,
            "cycle_max_lr": _CYCLE_LR,
            "decay_lr_rate": Param(AMOUNT, 0.0),
            "cycle_first_step_size": Param(POSITIVE, 2000, loud=True),
            "cycle_second_step_size": Param(optional(POSITIVE), None),
            # DeepSpeed stores the stairs and never uses them: no effect there, none here.
            "cycle_first_stair_count": Param(optional(WHOLE), 0),
            "cycle_second_stair_count": Param(optional(WHOLE), None),
            "decay_step_size": Param(WHOLE, 0),
            "cycle_momentum": Param(FLAG, True, loud=True),
            "cycle_min_mom": Param(BETA, 0.8),
            "cycle_max_mom": Param(BETA, 0.9),
            "decay_mom_rate": Param(NUMBER, 0.0),
            "last_batch_iteration": _LAST,
        }
    ),
    "LRRangeTest": Family(
        {
            "lr_range_test_min_lr": Param(AMOUNT, 1e-3, loud=True),
            "lr_range_test_step_size": Param(POSITIVE, 2000, loud=True),
            "lr_range_test_step_rate": Param(NUMBER, 1.0, loud=True),
            "lr_range_test_staircase": Param(FLAG, False),
            "last_batch_iteration": _LAST,
        }
    ),
}
