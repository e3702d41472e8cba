"""Keys of the search for settings."""

from zerojax.config.keys.row import (
    FLAG,
    POSITIVE,
    Key,
    ValueKind,
    choice,
    honoured,
    no_effect,
    off_only,
    optional,
)

_BOUNDS: dict[str, tuple[ValueKind, object, str]] = {
    "metric": (
        choice("throughput", "latency", "flops"),
        "throughput",
        "what fit ranks by: rows a second (as flops does, of one model), or a step's time",
    ),
    "max_train_batch_size": (optional(POSITIVE), None, "the most rows of an update"),
    "min_train_batch_size": (POSITIVE, 1, "the fewest rows of an update"),
    "max_train_micro_batch_size_per_gpu": (POSITIVE, 1024, "the largest micro-batch"),
    "min_train_micro_batch_size_per_gpu": (POSITIVE, 1, "the smallest micro-batch"),
    "num_tuning_micro_batch_sizes": (
        POSITIVE,
        3,
        "micro-batches that are compiled for each stage, remat and offload, at the most",
    ),
}

AUTOTUNING: tuple[Key, ...] = (
    honoured(
        "autotuning.enabled",
        FLAG,
        False,
        "true: `python -m zerojax fit` searches within this section; zerojax.zero says so and "
        "trains nothing",
    ),
    *(
        honoured(f"autotuning.{name}", kind, default, says)
        for name, (kind, default, says) in _BOUNDS.items()
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
)
