"""Keys of reports, and of what zerojax leaves to others or does not do."""

from collections.abc import Iterator
from typing import Any

from zerojax.config.kinds import (
    FLAG,
    INTEGER,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    WHOLE,
    Kind,
    optional,
)
from zerojax.config.row import ANYTHING, FLAG_OFF, TEXT_OR_NULL, Key, off, switched, taken


def reports() -> Iterator[Key]:
    yield from taken(
        "",
        "no effect",
        "no effect yet: logging is left to the training loop",
        steps_per_print=(optional(WHOLE), 10),
        wall_clock_breakdown=FLAG_OFF,
        memory_breakdown=FLAG_OFF,
        dump_state=FLAG_OFF,
    )
    monitor = {"output_path": TEXT_OR_NULL, "job_name": TEXT_OR_NULL}
    log = "monitors are not there yet; log the step's metrics in the training loop"
    yield from switched("tensorboard", log, **monitor)
    yield from switched("csv_monitor", log, **monitor)
    yield from switched("comet", log, project=TEXT_OR_NULL, workspace=TEXT_OR_NULL)
    yield from switched(
        "wandb", log, **monitor, team=TEXT_OR_NULL, group=TEXT_OR_NULL, project=TEXT_OR_NULL
    )
    yield from switched(
        "comms_logger",
        "read the collectives in the compiled text: train_step.lower(...).compile().as_text()",
        verbose=FLAG_OFF,
        prof_all=(FLAG, True),
        debug=FLAG_OFF,
        prof_ops=(ANYTHING, []),
    )
    yield from switched(
        "flops_profiler",
        "use jax.profiler, or cost_analysis() of the compiled step",
        profile_step=(WHOLE, 1),
        module_depth=(INTEGER, -1),
        top_modules=(WHOLE, 1),
        detailed=(FLAG, True),
        output_file=TEXT_OR_NULL,
        recompute_fwd_factor=(NUMBER, 0.0),
    )


def elsewhere() -> Iterator[Key]:
    yield from off(
        "activation_checkpointing",
        "rematerialisation is the model's: use flax's nn.remat or jax.checkpoint",
        partition_activations=FLAG_OFF,
        contiguous_memory_optimization=FLAG_OFF,
        cpu_checkpointing=FLAG_OFF,
        number_checkpoints=(optional(WHOLE), None),
        synchronize_checkpoint_boundary=FLAG_OFF,
        profile=FLAG_OFF,
    )
    yield from taken(
        "checkpoint",
        "no effect",
        "orbax saves and restores, on any number of devices",
        tag_validation=(TEXT, "Warn"),
        load_universal=FLAG_OFF,
        use_node_local_storage=FLAG_OFF,
        parallel_write=(OBJECT, {}),
        writer=(ANYTHING, None),
    )
    yield from taken(
        "aio",
        "no effect",
        "NVMe offload is off",
        block_size=(SIZE, 1_048_576),
        queue_depth=(POSITIVE, 8),
        thread_count=(POSITIVE, 1),
        intra_op_parallelism=(POSITIVE, 1),
        single_submit=FLAG_OFF,
        overlap_events=(FLAG, True),
        use_gds=FLAG_OFF,
    )
    axis = 'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it'
    yield from off("tensor_parallel", axis, autotp_size=(WHOLE, 0, 1), tp_size=(WHOLE, 1))
    yield from off(
        "", "shard the sequence in the model's own specs", sequence_parallel_size=(WHOLE, 1)
    )
    empty: tuple[Kind, Any] = (OBJECT, {})
    yield from off("", "pipeline parallelism is not supported", pipeline=empty)
    yield from off("", "compression is not supported", compression_training=empty)
    yield from off(
        "", "sparse attention belongs in the model", sparse_attention=(optional(OBJECT), None)
    )
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
    tuned = "autotuning is not supported; compile the step for each setting and compare"
    yield from switched(
        "autotuning",
        tuned,
        **{
            name: (ANYTHING, None)
            for name in (
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
        },
    )
    data = "the input pipeline is the user's own"
    free = (ANYTHING, None)
    yield from switched(
        "data_efficiency", data, seed=(WHOLE, 1234), data_sampling=free, data_routing=free
    )
    yield from switched(
        "curriculum_learning",
        data,
        curriculum_type=TEXT_OR_NULL,
        min_difficulty=free,
        max_difficulty=free,
        schedule_type=TEXT_OR_NULL,
        schedule_config=free,
    )
    yield from switched(
        "progressive_layer_drop",
        "drop layers in the model",
        theta=(NUMBER, 1.0),
        gamma=(NUMBER, 0.001),
    )
    yield from switched(
        "eigenvalue",
        "it is not supported",
        verbose=FLAG_OFF,
        max_iter=free,
        tol=free,
        stability=free,
        gas_boundary_resolution=free,
        layer_name=free,
        layer_num=free,
    )
    yield from switched(
        "amp", 'Apex is PyTorch\'s; use {"bf16": {"enabled": true}}', opt_level=free
    )
    yield from switched("hybrid_engine", "inference is not supported")
    yield from off(
        "",
        "gradients are averaged once, in the compute dtype, by the compiler's reduce-scatter",
        prescale_gradients=FLAG_OFF,
        gradient_predivide_factor=(NUMBER, 1.0),
        communication_data_type=(optional(TEXT), None),
        seq_parallel_communication_data_type=(optional(TEXT), None, "fp32"),
        sparse_gradients=FLAG_OFF,
        disable_allgather=FLAG_OFF,
    )
    yield from off("", "the input pipeline is the user's own", dataloader_drop_last=FLAG_OFF)
    yield from taken(
        "",
        "no effect",
        "any optax optimizer may be sharded",
        zero_allow_untested_optimizer=FLAG_OFF,
        zero_force_ds_cpu_optimizer=(FLAG, True),
    )
    yield from taken(
        "", "left to XLA", "every step is one compiled program", graph_harvesting=FLAG_OFF
    )
    yield from taken(
        "", "no effect", "the model knows its own", vocabulary_size=(optional(WHOLE), None)
    )
