"""Keys of what zerojax leaves to others or does not do."""

from typing import Any

from zerojax.config.keys.row import Key, honoured, left_to_xla, no_effect, off_only, off_section
from zerojax.config.keys.value_kinds import (
    ANYTHING,
    FLAG,
    FLAG_OFF,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    TEXT_OR_NULL,
    WHOLE,
    ValueKind,
    choice,
    optional,
)

_FREE: tuple[ValueKind, Any] = (ANYTHING, None)
_EMPTY: tuple[ValueKind, Any] = (OBJECT, {})

_AUTOTUNING = (
    "fast",
    "results_dir",
    "exps_dir",
    "overwrite",
    "start_profile_step",
    "end_profile_step",
    "metric",
    "metric_path",
    "tuner_type",
    "num_tuning_micro_batch_sizes",
    "tuner_early_stopping",
    "tuner_num_trials",
    "arg_mappings",
    "max_train_batch_size",
    "min_train_batch_size",
    "max_train_micro_batch_size_per_gpu",
    "min_train_micro_batch_size_per_gpu",
    "model_info",
    "mp_size",
)
_AXIS = 'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it'
_EXPERTS = "experts are sharded by the model's own specs"
_INPUT = "the input pipeline is the user's own"

OTHERS: tuple[Key, ...] = (
    # The model.
    *off_only(
        "activation_checkpointing",
        "rematerialisation is the model's: use flax's nn.remat or jax.checkpoint",
        partition_activations=FLAG_OFF,
        contiguous_memory_optimization=FLAG_OFF,
        number_checkpoints=(optional(WHOLE), None),
        synchronize_checkpoint_boundary=FLAG_OFF,
        profile=FLAG_OFF,
    ),
    honoured(
        "activation_checkpointing.cpu_checkpointing",
        FLAG,
        False,
        field="cpu_checkpointing",
        auto="off: not asked for",
        why="true: residuals of rematerialised blocks in a scan are kept in host memory",
    ),
    *off_only(
        "", "sparse attention belongs in the model", sparse_attention=(optional(OBJECT), None)
    ),
    *off_section(
        "progressive_layer_drop",
        "drop layers in the model",
        theta=(NUMBER, 1.0),
        gamma=(NUMBER, 0.001),
    ),
    *off_only("", "compression is not supported", compression_training=_EMPTY),
    *off_only("", "inference is not supported", weight_quantization=(optional(OBJECT), None)),
    *off_section("hybrid_engine", "inference is not supported"),
    *off_section(
        "eigenvalue",
        "it is not supported",
        verbose=FLAG_OFF,
        max_iter=_FREE,
        tol=_FREE,
        stability=_FREE,
        gas_boundary_resolution=_FREE,
        layer_name=_FREE,
        layer_num=_FREE,
    ),
    *no_effect("", "the model knows its own", vocabulary_size=(optional(WHOLE), None)),
    # Parallelism other than ZeRO.
    *off_only("tensor_parallel", _AXIS, autotp_size=(WHOLE, 0, 1), tp_size=(WHOLE, 1)),
    *off_only("", "shard the sequence in the model's own specs", sequence_parallel_size=(WHOLE, 1)),
    *off_only("", "pipeline parallelism is not supported", pipeline=_EMPTY),
    *off_section("expert_parallel", _EXPERTS),
    *off_only("", _EXPERTS, use_data_before_expert_parallelism=FLAG_OFF),
    *off_section(
        "elasticity",
        "a run restores its checkpoint on any number of devices; set the batch sizes by hand",
        max_train_batch_size=(POSITIVE, 2000),
        micro_batch_sizes=(ANYTHING, [2, 4, 6]),
        min_gpus=(POSITIVE, 1),
        max_gpus=(POSITIVE, 10_000),
        min_time=(WHOLE, 0),
        version=(NUMBER, 0.2),
        prefer_larger_batch=(FLAG, True),
        ignore_non_elastic_batch_info=FLAG_OFF,
        num_gpus_per_node=(POSITIVE, 1),
        model_parallel_size=(POSITIVE, 1),
    ),
    *off_section(
        "autotuning",
        "autotuning is not supported; compile the step for each setting and compare",
        **dict.fromkeys(_AUTOTUNING, _FREE),
    ),
    # Gradients.
    *off_only(
        "",
        "gradients are averaged once, in the compute dtype, by the compiler's reduce-scatter",
        prescale_gradients=FLAG_OFF,
        gradient_predivide_factor=(NUMBER, 1.0),
        gradient_allreduce_op=(choice("mean", "sum"), "mean"),
        communication_data_type=(optional(TEXT), None),
        seq_parallel_comm_data_type=(optional(TEXT), None, "fp32"),
        seq_parallel_communication_data_type=(optional(TEXT), None, "fp32"),
        sparse_gradients=FLAG_OFF,
        disable_allgather=FLAG_OFF,
    ),
    *off_only(
        "",
        "the decorated step cuts the batch into micro-batches itself",
        managed_gradient_accumulation=(FLAG, True),
    ),
    *off_section("amp", 'Apex is PyTorch\'s; use {"bf16": {"enabled": true}}', opt_level=_FREE),
    *no_effect(
        "",
        "any optax optimizer may be sharded",
        zero_allow_untested_optimizer=FLAG_OFF,
        zero_force_ds_cpu_optimizer=(FLAG, True),
    ),
    # Checkpoints and disks.
    *no_effect(
        "checkpoint",
        "orbax saves and restores, on any number of devices",
        tag_validation=(TEXT, "Warn"),
        load_universal=FLAG_OFF,
        use_node_local_storage=FLAG_OFF,
        parallel_write=_EMPTY,
        writer=_FREE,
    ),
    *off_section(
        "nebula",
        "orbax saves and restores, asynchronously too",
        persistent_storage_path=_FREE,
        persistent_time_interval=_FREE,
        num_of_version_in_retention=_FREE,
        enable_nebula_load=_FREE,
        load_path=_FREE,
    ),
    *no_effect(
        "aio",
        "tensorstore schedules the disk by itself",
        block_size=(SIZE, 1_048_576),
        queue_depth=(POSITIVE, 8),
        thread_count=(POSITIVE, 1),
        intra_op_parallelism=(POSITIVE, 1),
        single_submit=FLAG_OFF,
        overlap_events=(FLAG, True),
        use_gds=FLAG_OFF,
    ),
    # Data.
    *off_only("", _INPUT, dataloader_drop_last=FLAG_OFF),
    *off_section(
        "data_efficiency", _INPUT, seed=(WHOLE, 1234), data_sampling=_FREE, data_routing=_FREE
    ),
    *off_section(
        "curriculum_learning",
        _INPUT,
        curriculum_type=TEXT_OR_NULL,
        min_difficulty=_FREE,
        max_difficulty=_FREE,
        schedule_type=TEXT_OR_NULL,
        schedule_config=_FREE,
    ),
    # The compiler.
    *left_to_xla(
        "",
        "every step is one compiled program",
        graph_harvesting=FLAG_OFF,
        compile=_EMPTY,
    ),
)
