"""Keys of what zerojax leaves to others or does not do."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.kinds import (
    FLAG,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    WHOLE,
    Kind,
    choice,
    optional,
)
from zerojax.config.row import ANYTHING, FLAG_OFF, TEXT_OR_NULL, Key, honoured, off, switched, taken

_FREE: tuple[Kind, Any] = (ANYTHING, None)
_EMPTY: tuple[Kind, Any] = (OBJECT, {})

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


def model() -> Iterator[Key]:
    yield from off(
        "activation_checkpointing",
        "rematerialisation is the model's: use flax's nn.remat or jax.checkpoint",
        partition_activations=FLAG_OFF,
        contiguous_memory_optimization=FLAG_OFF,
        number_checkpoints=(optional(WHOLE), None),
        synchronize_checkpoint_boundary=FLAG_OFF,
        profile=FLAG_OFF,
    )
    yield from honoured(
        "activation_checkpointing.cpu_checkpointing",
        FLAG,
        False,
        field="cpu_checkpointing",
        auto="off: not asked for",
        why="true: residuals of rematerialised blocks in a scan are kept in host memory",
    )
    yield from off(
        "", "sparse attention belongs in the model", sparse_attention=(optional(OBJECT), None)
    )
    yield from switched(
        "progressive_layer_drop",
        "drop layers in the model",
        theta=(NUMBER, 1.0),
        gamma=(NUMBER, 0.001),
    )
    yield from off("", "compression is not supported", compression_training=_EMPTY)
    yield from off("", "inference is not supported", weight_quantization=(optional(OBJECT), None))
    yield from switched("hybrid_engine", "inference is not supported")
    yield from switched(
        "eigenvalue",
        "it is not supported",
        verbose=FLAG_OFF,
        max_iter=_FREE,
        tol=_FREE,
        stability=_FREE,
        gas_boundary_resolution=_FREE,
        layer_name=_FREE,
        layer_num=_FREE,
    )
    yield from taken(
        "", "no effect", "the model knows its own", vocabulary_size=(optional(WHOLE), None)
    )


def parallel() -> Iterator[Key]:
    axis = 'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it'
    yield from off("tensor_parallel", axis, autotp_size=(WHOLE, 0, 1), tp_size=(WHOLE, 1))
    yield from off(
        "", "shard the sequence in the model's own specs", sequence_parallel_size=(WHOLE, 1)
    )
    yield from off("", "pipeline parallelism is not supported", pipeline=_EMPTY)
    experts = "experts are sharded by the model's own specs"
    yield from switched("expert_parallel", experts)
    yield from off("", experts, use_data_before_expert_parallelism=FLAG_OFF)
    yield from switched(
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
    )
    yield from switched(
        "autotuning",
        "autotuning is not supported; compile the step for each setting and compare",
        **dict.fromkeys(_AUTOTUNING, _FREE),
    )


def gradients() -> Iterator[Key]:
    yield from off(
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
    )
    yield from off(
        "",
        "the decorated step cuts the batch into micro-batches itself",
        managed_gradient_accumulation=(FLAG, True),
    )
    yield from switched(
        "amp", 'Apex is PyTorch\'s; use {"bf16": {"enabled": true}}', opt_level=_FREE
    )
    yield from taken(
        "",
        "no effect",
        "any optax optimizer may be sharded",
        zero_allow_untested_optimizer=FLAG_OFF,
        zero_force_ds_cpu_optimizer=(FLAG, True),
    )


def storage() -> Iterator[Key]:
    yield from taken(
        "checkpoint",
        "no effect",
        "orbax saves and restores, on any number of devices",
        tag_validation=(TEXT, "Warn"),
        load_universal=FLAG_OFF,
        use_node_local_storage=FLAG_OFF,
        parallel_write=_EMPTY,
        writer=_FREE,
    )
    yield from switched(
        "nebula",
        "orbax saves and restores, asynchronously too",
        persistent_storage_path=_FREE,
        persistent_time_interval=_FREE,
        num_of_version_in_retention=_FREE,
        enable_nebula_load=_FREE,
        load_path=_FREE,
    )
    yield from taken(
        "aio",
        "no effect",
        "tensorstore schedules the disk by itself",
        block_size=(SIZE, 1_048_576),
        queue_depth=(POSITIVE, 8),
        thread_count=(POSITIVE, 1),
        intra_op_parallelism=(POSITIVE, 1),
        single_submit=FLAG_OFF,
        overlap_events=(FLAG, True),
        use_gds=FLAG_OFF,
    )


def data() -> Iterator[Key]:
    why = "the input pipeline is the user's own"
    yield from off("", why, dataloader_drop_last=FLAG_OFF)
    yield from switched(
        "data_efficiency", why, seed=(WHOLE, 1234), data_sampling=_FREE, data_routing=_FREE
    )
    yield from switched(
        "curriculum_learning",
        why,
        curriculum_type=TEXT_OR_NULL,
        min_difficulty=_FREE,
        max_difficulty=_FREE,
        schedule_type=TEXT_OR_NULL,
        schedule_config=_FREE,
    )


def compiler() -> Iterator[Key]:
    yield from taken(
        "",
        "left to XLA",
        "every step is one compiled program",
        graph_harvesting=FLAG_OFF,
        compile=_EMPTY,
    )
