"""Keys of one-time reports on a step (FLOPs, collectives, memory), and of the settings search."""

from typing import Annotated

from pydantic import BeforeValidator, Field, StrictStr

from zerojax.config.keys.row import (
    FLAG,
    FLAG_OFF,
    NON_NEGATIVE,
    POSITIVE,
    TEXT_OR_NULL,
    Key,
    ValueKind,
    choice,
    honoured,
    no_effect,
    off_only,
    optional,
    setting,
)

_DEPTH = ValueKind("-1 (every depth) or a depth", Annotated[int, Field(strict=True, ge=-1)])
_OPERATIONS = ValueKind(
    'a list of names, as ["all_gather"]',
    Annotated[
        tuple[StrictStr, ...], BeforeValidator(lambda x: tuple(x) if isinstance(x, list) else x)
    ],
)
_COUNT = (POSITIVE, 1)

_SECTIONS: dict[str, tuple[str, dict[str, tuple[ValueKind, object, str]]]] = {
    "flops_profiler": (
        "true: FLOPs, parameters and forecast time of each module, and the time of one step",
        {
            "profile_step": (NON_NEGATIVE, 1, "the step that is timed, counted from 0"),
            "module_depth": (_DEPTH, -1, "how deep modules are listed; -1 is every depth"),
            "top_modules": (
                NON_NEGATIVE,
                1,
                "so many modules of each depth, those of most FLOPs first",
            ),
            "detailed": (FLAG, True, "true: the tree of modules below the largest of each depth"),
            "output_file": (*TEXT_OR_NULL, "the file in place of the log"),
        },
    ),
    "comms_logger": (
        "true: collectives of the compiled step by kind and size, with their forecast time",
        {
            "verbose": (*FLAG_OFF, "true: each collective on a line of its own"),
            "prof_all": (FLAG, True, "true: every kind; false: those of prof_ops"),
            "debug": (*FLAG_OFF, "true: with the operation that it comes from"),
            "prof_ops": (_OPERATIONS, (), "the kinds that are listed, by torch's or XLA's names"),
        },
    ),
    "autotuning": (
        "true: `python -m zerojax fit` searches within this section; zerojax.zero says so and "
        "trains nothing",
        {
            "metric": (
                choice("throughput", "latency", "flops"),
                "throughput",
                "what fit ranks by: rows a second (as flops does, of one model), or a step's time",
            ),
            "max_train_batch_size": (optional(POSITIVE), None, "the most rows of an update"),
            "min_train_batch_size": (*_COUNT, "the fewest rows of an update"),
            "max_train_micro_batch_size_per_gpu": (POSITIVE, 1024, "the largest micro-batch"),
            "min_train_micro_batch_size_per_gpu": (*_COUNT, "the smallest micro-batch"),
            "num_tuning_micro_batch_sizes": (
                POSITIVE,
                3,
                "micro-batches that are compiled for each stage, remat and offload, at the most",
            ),
        },
    ),
}

PROFILING: tuple[Key, ...] = (
    *(
        key
        for section, (why, keys) in _SECTIONS.items()
        for key in (
            honoured(f"{section}.enabled", FLAG, False, why),
            *(
                honoured(f"{section}.{name}", kind, default, says)
                for name, (kind, default, says) in keys.items()
            ),
        )
    ),
    *no_effect(
        "flops_profiler", "what the backward pass computes again is counted", "recompute_fwd_factor"
    ),
    *no_effect(
        "autotuning",
        "fit compiles each choice and runs none",
        "start_profile_step end_profile_step metric_path fast",
    ),
    *no_effect(
        "autotuning",
        "fit has one search, which its --compiles and --minutes end",
        "tuner_type tuner_early_stopping tuner_num_trials",
    ),
    *no_effect(
        "autotuning",
        "fit --out names the config that is written, and ~/.cache/zerojax remembers compiles",
        "results_dir exps_dir overwrite",
    ),
    *no_effect(
        "autotuning",
        "fit writes a config; a script's own arguments are its caller's",
        "arg_mappings",
    ),
    *no_effect("autotuning", "fit traces the model", "model_info model_info_path"),
    *off_only(
        "autotuning",
        "fit searches for data-parallel devices; plan a model-parallel step with zerojax.zero "
        'and a mesh with a "model" axis',
        mp_size=(POSITIVE, 1),
    ),
    setting(
        "memory_breakdown",
        FLAG,
        False,
        "true: the memory of each device by what holds it, once the step is compiled",
    ),
    setting("dump_state", FLAG, False, "true: zerojax.zero prints every setting in force"),
)
