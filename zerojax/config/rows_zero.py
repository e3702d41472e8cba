"""Keys of `zero_optimization`; those of offload are in `rows_offload`."""

from collections.abc import Iterator

from zerojax.config.kinds import FLAG, INTEGER, OBJECT, SIZE, STAGE, WHOLE, optional
from zerojax.config.row import FLAG_OFF, Key, honoured, off, taken


def zero() -> Iterator[Key]:
    zero = "zero_optimization"
    yield from honoured(
        f"{zero}.stage",
        STAGE,
        0,
        field="stage",
        why="0 shards nothing, 1 the optimizer state, 2 the gradients too, 3 the parameters too",
    )
    yield from honoured(
        f"{zero}.stage3_param_persistence_threshold",
        SIZE,
        100_000,
        field="stage3_param_persistence_threshold",
        auto="DeepSpeed's default, 100000 elements",
        why="parameters of fewer elements stay whole",
    )
    yield from honoured(
        f"{zero}.stage3_gather_16bit_weights_on_model_save",
        FLAG,
        False,
        field="stage3_gather_16bit_weights_on_model_save",
        auto="DeepSpeed's default, weights in the dtype in which they are saved",
        why="if true, `python -m zerojax export` writes 16-bit weights by default, at every stage",
    )
    yield from taken(
        zero,
        "left to XLA",
        "the compiler schedules, combines and overlaps the collectives",
        contiguous_gradients=(FLAG, True),
        reduce_scatter=(FLAG, True),
        allgather_partitions=(FLAG, True),
        reduce_bucket_size=(SIZE, 500_000_000),
        allgather_bucket_size=(SIZE, 500_000_000),
        overlap_comm=(optional(FLAG), None),
        round_robin_gradients=FLAG_OFF,
        use_multi_rank_bucket_allreduce=(FLAG, True),
        stage3_prefetch_bucket_size=(SIZE, 50_000_000),
        stage3_max_live_parameters=(SIZE, 1_000_000_000),
        stage3_max_reuse_distance=(SIZE, 1_000_000_000),
        stage3_module_granularity_threshold=(SIZE, 0),
        stage3_use_all_reduce_for_fetch_params=FLAG_OFF,
        stage3_allgather_sequential=FLAG_OFF,
        stage3_partition_stream_chunk_size=(SIZE, 0),
        memory_efficient_linear=(FLAG, True),
        parameter_alignment=FLAG_OFF,
    )
    yield from taken(
        zero,
        "no effect",
        "stage3_param_persistence_threshold alone says what stays whole",
        stage3_model_persistence_threshold=(SIZE, 2**63 - 1),
    )
    yield from taken(
        zero,
        "no effect",
        "checkpoints hold sharded arrays and restore on any number of devices",
        elastic_checkpoint=FLAG_OFF,
        load_from_fp32_weights=(FLAG, True),
        pipeline_loading_checkpoint=FLAG_OFF,
    )
    yield from taken(
        zero,
        "no effect",
        "it steers a PyTorch runtime",
        override_module_apply=(FLAG, True),
        log_trace_cache_warnings=FLAG_OFF,
        enable_sanity_checks=FLAG_OFF,
        compute_grad_norm=(FLAG, True),
        leaf_module=(OBJECT, {}),
    )
    yield from off(
        zero,
        "under jax.grad an unused parameter has a zero gradient and is no error",
        ignore_unused_parameters=(FLAG, True),
    )
    yield from off(zero, "one implementation of stage 1 is enough", legacy_stage1=FLAG_OFF)
    yield from off(
        zero,
        "a second, smaller shard group is not there yet",
        zero_hpz_partition_size=(WHOLE, 1, 0),
        mics_shard_size=(INTEGER, -1, 0),
        mics_hierarchical_params_gather=FLAG_OFF,
    )
    yield from off(
        zero,
        "quantized collectives are not there yet; bf16 halves the bytes moved",
        zero_quantized_weights=FLAG_OFF,
        zero_quantized_gradients=FLAG_OFF,
        zero_quantized_nontrainable_weights=FLAG_OFF,
        zeropp_loco_param=(optional(OBJECT), None),
    )
    yield from off(zero, "ZenFlow is not supported", zenflow=(optional(OBJECT), None))
