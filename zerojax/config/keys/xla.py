"""Options of XLA's GPU compiler, by XLA's names: zerojax's own section.

Some versions of XLA lack some of them: :func:`zerojax.xla.compiler.options` refuses these by name.
"""

from zerojax.config.keys.row import (
    COUNT,
    FLAG,
    SIZE,
    TEXT,
    Key,
    ValueKind,
    choice,
    optional,
    setting,
)

_UNROLLING = choice(
    *(
        f"WHILE_LOOP_UNROLLING_{name}"
        for name in ("NO_UNROLL", "DOUBLE_BUFFER", "FULL_UNROLL", "AUTO_UNROLL")
    )
)
_MEMORY = choice(*(f"COLLECTIVES_{name}_MEMORY" for name in ("PRIVATE", "PEER", "SYMMETRIC")))
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
    (
        "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit",
        COUNT,
        "collectives inside a node under way at a time, beside those between nodes",
    ),
    (
        "xla_gpu_experimental_enable_nccl_symmetric_buffers",
        FLAG,
        "true: collectives read and write memory that is mapped on all GPUs of a node",
    ),
    (
        "xla_disable_hlo_passes",
        TEXT,
        "passes of XLA to leave out, separated by commas; with an empty text, XLA computes values "
        "again where it estimates that they do not fit (the pass rematerialization)",
    ),
    (
        "xla_gpu_all_gather_mode",
        _MEMORY,
        "the memory of all-gathers; with PEER and SYMMETRIC, GPUs copy from one another",
    ),
)

XLA: tuple[Key, ...] = tuple(
    setting(
        f"xla.{name}",
        optional(kind),
        None,
        f"zerojax's own key, for GPUs: {why}; null is zerojax's choice",
        auto="zerojax's choice",
    )
    for name, kind, why in _OPTIONS
)
