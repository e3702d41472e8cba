"""Options of XLA's GPU compiler, by XLA's names: zerojax's own section.

XLA ends the process on an unknown option. The section therefore has only options that every version
of XLA tested with zerojax knows.
"""

from zerojax.config.keys.row import COUNT, FLAG, SIZE, Key, ValueKind, choice, optional, setting

_UNROLLING = choice(
    *(
        f"WHILE_LOOP_UNROLLING_{name}"
        for name in ("NO_UNROLL", "DOUBLE_BUFFER", "FULL_UNROLL", "AUTO_UNROLL")
    )
)
_COMBINED = "bytes of results that collectives of one kind are combined up to"

_OPTIONS: tuple[tuple[str, ValueKind, str], ...] = (
    (
        "xla_gpu_enable_latency_hiding_scheduler",
        FLAG,
        "true: the schedule hides collectives behind computation",
    ),
    ("xla_gpu_all_gather_combine_threshold_bytes", SIZE, _COMBINED),
    ("xla_gpu_reduce_scatter_combine_threshold_bytes", SIZE, _COMBINED),
    ("xla_gpu_all_reduce_combine_threshold_bytes", SIZE, _COMBINED),
    (
        "xla_gpu_enable_while_loop_unrolling",
        _UNROLLING,
        "how loops are unrolled; DOUBLE_BUFFER lets two iterations overlap",
    ),
    (
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        COUNT,
        "collectives under way at a time",
    ),
)

XLA: tuple[Key, ...] = tuple(
    setting(
        f"xla.{name}",
        optional(kind),
        None,
        f"zerojax's own key, for GPUs: {why}; null is zerojax's choice",
        auto="zerojax's choice; `zerojax fit --xla` compares",
    )
    for name, kind, why in _OPTIONS
)
