"""Keys of XLA's GPU compiler: zerojax's own section, by XLA's names.

An option that XLA does not know ends the process, so that only those are keys which every version
of XLA that zerojax is tested with knows.
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
        "true: the schedule is made to hide collectives behind computation",
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
