"""Keys of the training step: batch, precision, clipping, sharding and offload."""

from collections.abc import Iterator

from zerojax.config.keys.row import (
    AMOUNT,
    BUFFERS,
    COUNT,
    DTYPE,
    FLAG,
    FLAG_OFF,
    FRACTION,
    GROUP,
    NON_NEGATIVE,
    OBJECT,
    OFF,
    POSITIVE,
    POWER,
    SCALE,
    SCALE_OR_ZERO,
    SIZE,
    STAGE,
    TEXT,
    ZERO,
    Key,
    ValueKind,
    choice,
    honoured,
    left_to_xla,
    no_effect,
    off_only,
    off_section,
    optional,
    setting,
)

FIT = "`zerojax.fit` or `python -m zerojax fit`"
"""The command that searches for values that depend on a forecast, as text."""

_MASTERS = "master weights and optimizer state stay in fp32, sharded over the devices"

_SIZES = (
    ("train_batch_size", "rows per update, over all devices"),
    ("train_micro_batch_size_per_gpu", "rows of one device in one micro-batch"),
    ("gradient_accumulation_steps", "micro-batches per update"),
)

_SCALING: tuple[tuple[str, ValueKind, object, str], ...] = (
    ("auto_cast", *FLAG_OFF, "true: float leaves of the batch are cast to the compute dtype"),
    ("loss_scale", SCALE_OR_ZERO, 0.0, "0 is a dynamic scale, all else a static one"),
    ("initial_scale_power", POWER, 16, "the dynamic scale starts at 2**this"),
    ("loss_scale_window", COUNT, 1000, "good updates after which the scale doubles"),
    ("hysteresis", COUNT, 2, "overflows before the scale halves"),
    ("consecutive_hysteresis", *FLAG_OFF, "true: a good update refills the hysteresis"),
    ("min_loss_scale", SCALE, 1.0, "the scale halves no further"),
)

TRAINING: tuple[Key, ...] = (
    *(
        setting(name, POSITIVE, None, why, auto="taken from the batch that comes")
        for name, why in _SIZES
    ),
    *off_section(
        "elasticity",
        "JAX has no agent that changes the number of devices in a run; write train_batch_size and "
        "train_micro_batch_size_per_gpu for the devices of this run",
        "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch "
        "ignore_non_elastic_batch_info version num_gpus_per_node model_parallel_size",
    ),
    setting(
        "gradient_clipping",
        AMOUNT,
        1.0,
        "the largest global norm of the averaged gradient; 0 is off",
        loud="DeepSpeed clips the global norm to 1.0 by default; 0 turns it off",
    ),
    setting(
        "check_finite",
        FLAG,
        False,
        "zerojax's own key: true skips updates that are not finite at any precision, as fp16 "
        "does and bf16 with check_grad_overflow; DeepSpeed applies such updates in fp32",
    ),
    setting(
        "accumulate_statistics",
        FLAG,
        False,
        "zerojax's own key: true lets each micro-batch compute statistics of its own rows, such as "
        "BatchNorm's, as DeepSpeed does; false refuses such a step under accumulation",
    ),
    setting(
        "data_types.grad_accum_dtype",
        optional(DTYPE),
        None,
        "dtype of the sum over micro-batches; null is the gradient's own",
        auto="the gradient's own dtype",
    ),
    *off_only(
        "data_types",
        "fp16 and bf16 choose the compute dtype, the model its buffers'",
        param_dtype=(optional(TEXT), None),
        buffer_dtype=(optional(TEXT), None),
    ),
    setting(
        "bf16.enabled",
        FLAG,
        False,
        "true: the step's body sees parameters in bfloat16",
        auto='off, unless the program asks for it: auto={"bf16.enabled": True}',
    ),
    setting(
        "bf16.check_grad_overflow",
        FLAG,
        True,
        "true: updates that are not finite are skipped",
        loud="DeepSpeed skips updates in bf16 that are not finite by default; false turns it off",
    ),
    *off_only(
        "bf16", _MASTERS, bf16_master_weights_and_grads=FLAG_OFF, bf16_optimizer_states=FLAG_OFF
    ),
    *left_to_xla(
        "bf16", "the compiler adds gradients up as they are produced", "immediate_grad_update"
    ),
    setting(
        "fp16.enabled",
        FLAG,
        False,
        "true: the step's body sees parameters in float16, and the loss is scaled",
        auto='off, unless the program asks for it: auto={"fp16.enabled": True}',
    ),
    *(setting(f"fp16.{name}", kind, default, why) for name, kind, default, why in _SCALING),
    setting(
        "fp16.raise_error_at_min_scale",
        FLAG,
        True,
        "zerojax's own key: true stops at an overflow at the smallest scale, false skips on",
    ),
    *off_only("fp16", _MASTERS, fp16_master_weights_and_grads=FLAG_OFF),
    *no_effect("fp16", "it chooses between implementations", "fused_mode"),
    *off_section(
        "torch_autocast",
        "use bf16 or fp16; what is to stay in fp32 the model says",
        "dtype lower_precision_safe_modules",
    ),
    honoured("optimizer.type", TEXT, None, "for zero.optimizer()", auto=None),
    honoured("optimizer.params", OBJECT, {}, auto=None),
    honoured("scheduler.type", TEXT, None, "for zero.optimizer()", auto=None),
    honoured("scheduler.params", OBJECT, {}, auto=None),
    *off_only("optimizer", "it names an Apex optimizer", legacy_fusion=FLAG_OFF),
)

OLD_SWITCHES: dict[str, tuple[str, ...]] = {
    "offload_optimizer": ("cpu_offload",),
    "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}
"""DeepSpeed's deprecated flags for `{"device": "cpu"}`, by section."""

SHARDING: tuple[Key, ...] = (
    setting(
        f"{ZERO}.stage",
        STAGE,
        0,
        "0 shards nothing, 1 the optimizer state, 2 the gradients too, 3 the parameters too",
        auto=None,
    ),
    setting(
        f"{ZERO}.stage3_param_persistence_threshold",
        SIZE,
        100_000,
        "parameters of fewer elements are replicated",
    ),
    setting(
        f"{ZERO}.stage3_max_live_parameters",
        SIZE,
        0,
        "so many elements of parameters, the largest first, stay gathered over an update; 0 is "
        "none, as without the key (DeepSpeed: 1e9)",
        auto=f"0: nothing stays gathered; {FIT} writes as many as fit, where they pay",
    ),
    setting(
        f"{ZERO}.stage3_max_reuse_distance",
        optional(SIZE),
        None,
        "a parameter stays gathered where forward and backward pass use no more elements of others "
        "before its next use; null or no key is no limit (DeepSpeed: 1e9)",
        auto="no limit beside stage3_max_live_parameters",
    ),
    setting(
        f"{ZERO}.zero_hpz_partition_size",
        NON_NEGATIVE,
        1,
        "the GPUs of a host, say: parameters are gathered from other hosts once a step, and "
        "within the host at each use; 1 is off",
    ),
    setting(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        FLAG,
        False,
        "if true, `python -m zerojax export` writes 16-bit weights by default, at every stage",
    ),
    setting(
        f"{ZERO}.mics_shard_size",
        GROUP,
        -1,
        "devices of a shard group: the state is cut within it, and each group has a copy; "
        "-1 is off",
    ),
    setting(
        f"{ZERO}.overlap_comm",
        optional(FLAG),
        None,
        "collectives run beside computation; false: the compiler schedules them as it likes, and a "
        "layer is gathered where it is used",
        auto="true",
    ),
    setting(
        f"{ZERO}.compute_grad_norm",
        FLAG,
        True,
        "false: the gradient's norm is computed only where an update needs it, for clipping or for "
        "skipping updates that are not finite",
    ),
    *left_to_xla(
        ZERO,
        "the compiler schedules, combines and overlaps the collectives",
        "contiguous_gradients reduce_scatter allgather_partitions reduce_bucket_size "
        "allgather_bucket_size round_robin_gradients use_multi_rank_bucket_allreduce "
        "stage3_prefetch_bucket_size stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "stage3_partition_stream_chunk_size memory_efficient_linear "
        "parameter_alignment",
    ),
    *no_effect(
        ZERO,
        "only stage3_param_persistence_threshold decides what is replicated",
        "stage3_model_persistence_threshold",
    ),
    *no_effect(
        ZERO,
        "checkpoints hold sharded arrays and restore on any number of devices",
        "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint",
    ),
    *no_effect(
        ZERO,
        "it steers a PyTorch runtime",
        "override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module",
    ),
    *off_only(
        ZERO,
        "under jax.grad an unused parameter has a zero gradient and is no error",
        ignore_unused_parameters=(FLAG, True),
    ),
    *off_only(ZERO, "one implementation of stage 1 is enough", legacy_stage1=FLAG_OFF),
    *no_effect(
        ZERO,
        "a group's gather is one collective, whose path the collectives' library chooses",
        "mics_hierarchical_params_gather",
    ),
    *off_only(ZERO, "ZenFlow is not supported", zenflow=(optional(OBJECT), None)),
)


def _offload_keys(section: str, buffers: int, why: str) -> Iterator[Key]:
    """Yields the keys that `offload_optimizer` and `offload_param` share."""
    path = f"{ZERO}.{section}"
    device = optional(choice("none", "cpu", "nvme"))
    yield honoured(f"{path}.device", device, "none", why, auto="none: not asked for")
    yield honoured(
        f"{path}.nvme_path",
        optional(TEXT),
        None,
        "the folder that the files are written to",
        auto='none: only device "nvme" has one',
    )
    yield honoured(
        f"{path}.buffer_count",
        BUFFERS,
        buffers,
        "the number of blocks in host memory at a time, prefetched and written back later",
    )
    yield from no_effect(path, "host memory is always pinned", "pin_memory")


_OPTIMIZER = f"{ZERO}.offload_optimizer"
_PARAM = f"{ZERO}.offload_param"

OFFLOAD: tuple[Key, ...] = (
    *_offload_keys(
        "offload_optimizer",
        4,
        "master weights and moments are stored in host memory (cpu) or on disk (nvme)",
    ),
    *_offload_keys(
        "offload_param",
        5,
        "parameters are stored in host memory (cpu) or on disk (nvme), and fetched "
        "before their use",
    ),
    honoured(
        f"{_OPTIMIZER}.ratio",
        FRACTION,
        1.0,
        "the share that is offloaded; the rest stays on the accelerator",
    ),
    honoured(
        f"{_OPTIMIZER}.compute_on",
        optional(choice("device", "host")),
        None,
        "zerojax's own: the update streams through the accelerator (device) or is computed by "
        "the host's cores (host); null is device, which gives the same bits as without offload",
        auto="device: what gives the same bits as without offload",
    ),
    *no_effect(
        _OPTIMIZER,
        "reads ahead and writes behind always run beside the update",
        "pipeline_read pipeline_write",
    ),
    *no_effect(_OPTIMIZER, "zero.init creates the state where it is stored", "fast_init"),
    *no_effect(
        _OPTIMIZER, "compute_on says where the update runs", "super_offload cpuadam_cores_perc"
    ),
    *no_effect(_OPTIMIZER, "gradients are cast where the update runs", "convert_grad_on_cpu"),
    honoured(
        f"{_PARAM}.max_in_cpu",
        SIZE,
        1_000_000_000,
        "so many elements of the parameters stay in host memory",
    ),
    *no_effect(_PARAM, "sizes come from sub_group_size", "buffer_size"),
    setting(
        f"{ZERO}.sub_group_size",
        SIZE,
        1_000_000_000,
        "an upper bound, in elements, on what is updated at a time under offload: zerojax "
        "streams in blocks of at most 33,554,432; 0 sets no bound of its own",
    ),
    *no_effect(
        ZERO, "momentum moves with the rest of the state", "save_muon_momentum_buffer_in_memory"
    ),
    *(
        honoured(
            f"{ZERO}.{name}",
            optional(FLAG),
            None,
            f'deprecated by DeepSpeed; true is read as {{"{section}": {{"device": "cpu"}}}}',
            auto=OFF,
        )
        for section, names in OLD_SWITCHES.items()
        for name in names
    ),
    *no_effect(ZERO, "host memory is always pinned", "cpu_offload_use_pin_memory"),
)
