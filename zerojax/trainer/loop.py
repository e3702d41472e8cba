"""``Trainer``: a training loop of ``zero.init``, ``@zero``, ``@zero.evaluate``, ``Checkpointer``.

To change more than the arguments allow, copy this file.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from zerojax.api import Zero, zero
from zerojax.checkpoint import PREEMPTED
from zerojax.checkpoint.processes import LONGEST, call_on_first
from zerojax.devices.arranged import in_stages
from zerojax.devices.mesh import batch_devices, micro_batch_devices
from zerojax.devices.mesh import mesh as all_devices
from zerojax.generation.decoders import longest_row
from zerojax.models.losses import model_loss, smoothed
from zerojax.trainer import data
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import Callbacks, TrainerCallback, TrainerControl, TrainerState, due
from zerojax.trainer.evaluation import (
    ComputeMetrics,
    Evaluator,
    PredictionOutput,
    Preprocess,
    evaluation_sets,
)
from zerojax.trainer.initial_state import InitialState
from zerojax.trainer.limits import Limits
from zerojax.trainer.model import (
    AnyModel,
    Loss,
    check_partial,
    config_of,
    hidden_size,
    model_of,
    objects,
)
from zerojax.trainer.optimizer import optimizer_of
from zerojax.trainer.other_arguments import refuse, refuse_overrides
from zerojax.trainer.padding import padded_by
from zerojax.trainer.partial import Partial
from zerojax.trainer.reports import Progress, Reports
from zerojax.trainer.resolved import resolved, stages_in
from zerojax.trainer.run_folder import RunFolder, preemption_notice, temporary_checkpoint
from zerojax.trainer.saved_model import write_model
from zerojax.trainer.script_methods import ScriptMethods
from zerojax.xla.types import PyTree


class TrainOutput(NamedTuple):
    """Result of ``train``: total updates, and the mean loss and metrics of the call."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(ScriptMethods):
    """Trains, evaluates and saves a model with ZeRO, as Hugging Face's Trainer does.

    Args:
      model: A linen module; an NNX module, or a function of ``rngs`` that creates it (created
        sharded).
      args: :class:`TrainingArguments`, or transformers' own; None for the defaults.
      train_dataset, eval_dataset: Anything with ``__len__`` and ``__getitem__`` whose rows are
        dicts: a list, ``datasets.Dataset``, ``grain.MapDataset``. Or a stream, with ``__iter__``
        only: ``datasets.IterableDataset``, ``grain.IterDataset``; training needs ``max_steps``. A
        dict of evaluation sets gives metrics such as ``eval_NAME_loss``.
      processing_class, tokenizer: The tokenizer or processor of the data (one of both names): it
        pads ragged rows, see :mod:`zerojax.trainer.padding`, and ``save_model`` writes it.
      data_collator: A function from a list of rows to a dict of arrays; stacks rows by default.
      loss: A function from ``(model, batch)`` to a loss and predictions, see
        :mod:`zerojax.trainer.losses` and :mod:`zerojax.models.losses`; by default
        ``model(**batch)``, which takes ``labels`` and returns the loss and predictions.
      params: The parameters to start from: a tree, or a function of the abstract parameters, such
        as ``lambda like: load(folder, config, like=like)``. New parameters by default.
      compute_metrics: A function from an ``EvalPrediction`` to a dict of numbers.
      preprocess_logits_for_metrics: A function from ``(predictions, labels)`` to the predictions to
        keep; runs on the devices.
      callbacks: Instances or classes of :class:`zerojax.trainer.TrainerCallback`.
      optimizer: An optax transformation with its schedule, in place of the optimizer of the
        arguments or the JSON; arguments that would have no effect are an error if they are set.
      mesh, specs: As for :func:`zerojax.zero`.

    Raises:
      ConfigError: The arguments or the JSON are invalid, or contradict each other.
      TypeError, ValueError: A dataset or a callback is unusable.

    Example:
      >>> import flax.linen as nn, numpy as np, tempfile, zerojax
      >>> from zerojax.trainer import classification_loss
      >>> class Classifier(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(4)(x)
      >>> rows = [{"x": np.eye(4, dtype="float32")[i % 4], "label": i % 4} for i in range(128)]
      >>> trainer = zerojax.Trainer(
      ...     Classifier(),
      ...     zerojax.TrainingArguments(tempfile.mkdtemp(), fsdp="full_shard", learning_rate=0.1,
      ...                               save_strategy="no", max_steps=24),
      ...     train_dataset=rows, eval_dataset=rows, loss=classification_loss)
      >>> trainer.train().global_step  # doctest: +ELLIPSIS
      trained to step 24/24, epoch 12, in ...
      24
      >>> metrics = trainer.evaluate()  # doctest: +ELLIPSIS
      step 24/24  eval_loss 0.2... rows/s
    """

    args: TrainingArguments
    callbacks: Callbacks
    train_dataset: data.AnyDataset | None
    eval_dataset: data.AnyDataset | Mapping[str, data.AnyDataset] | None
    epochs: data.Epochs
    zero: Zero
    state: TrainerState
    control: TrainerControl

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls)

    def __init__(
        self,
        model: AnyModel,
        args: object = None,
        *,
        train_dataset: data.AnyDataset | None = None,
        eval_dataset: data.AnyDataset | Mapping[str, data.AnyDataset] | None = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        data_collator: data.Collator | None = None,
        loss: Loss = model_loss,
        params: PyTree = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
        optimizer: optax.GradientTransformation | None = None,
        mesh: Mesh | None = None,
        specs: PyTree = None,
        **others: object,
    ) -> None:
        refuse(others, inspect.signature(Trainer).parameters)
        self.args = args = TrainingArguments.of(args)
        self.processing_class = tokenizer if processing_class is None else processing_class
        self.callbacks = Callbacks(
            callbacks, args, model=model, processing_class=self.processing_class
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._collator = data_collator or padded_by(self.processing_class, longest_row(model))
        final_loss = smoothed(loss, args.label_smoothing_factor)
        self._model = model_of(model, final_loss, args.seed, args.gradient_checkpointing)
        devices = in_stages(all_devices(), stages_in(args)) if mesh is None else mesh
        world = micro_batch_devices(devices)
        self._limits = Limits(model, loss, self._model.traced, world, args.label_names)
        self.epochs = data.Epochs.of(train_dataset, args, world)
        if eval_dataset is not None:
            for name, dataset in evaluation_sets(eval_dataset, "eval_dataset").items():
                data.check(name, dataset)
        elif args.eval_strategy != "no":
            raise ValueError(f'eval_strategy is "{args.eval_strategy}": pass an eval_dataset')
        steps = self.epochs.steps
        config = resolved(args, world=world, steps=steps, hidden_size=hidden_size(model))
        self.zero = zero(config, mesh=mesh, specs=specs)
        self._config = config_of(model)
        self._folder = partial(RunFolder, args, self.zero, self.epochs, self._config)
        tx = optimizer_of(args, self.zero, steps, optimizer)
        self._initial = InitialState(self._model, self.zero, tx, params)
        self._step = self.zero(self._model.train_step, static_argnames="partial")
        rows = self.epochs.batch
        self._reports = Reports(args, self.callbacks, self._step, rows, self.zero.mesh)
        self._evaluator = Evaluator(
            self._model, self.zero, batch_devices(devices) * args.per_device_eval_batch_size,
            tuple(args.label_names),
            compute_metrics, preprocess_logits_for_metrics,
        )  # fmt: skip
        self.train_state: PyTree = None  # created when first needed
        self.state, self.control = TrainerState(max_steps=steps), TrainerControl()
        self._saved: int | None = None  # the step whose checkpoint stores the current state
        self.callbacks("on_init_end", self.state, self.control)

    def train(
        self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None
    ) -> TrainOutput:
        """Trains to the last step.

        Args:
          resume_from_checkpoint: True to resume from the newest checkpoint in ``output_dir``, with
            the same results as a run without interruption; a path to resume from that checkpoint.
            By default, a new run starts.

        Raises:
          CheckpointError: There is no such checkpoint, or its run read other data; or a new run
            would mix its checkpoints with those of an earlier run.
          SystemExit: SIGTERM arrived; the status is 75, and a last checkpoint was saved.
        """
        args, epochs = self.args, self.epochs
        reader = self._reader(self.train_dataset, "train_dataset")
        self._check_last(reader)
        key = jax.random.split(jax.random.key(args.seed), 3)[2]  # model init uses the rest
        progress = self._reports.progress = Progress()
        with self._folder() as folder:
            if self.state.global_step or resume_from_checkpoint:
                self.train_state = None  # free memory before the next state is created
                self._step.close()  # monitors have another run
            begun = folder.begin(resume_from_checkpoint, self._ready, self._abstract)
            self.train_state, self.state = begun[:2]
            progress.losses += begun.losses
            state, start, control = self.state, self.state.global_step, TrainerControl()
            stored_steps, self.control = folder.checkpoints.all_steps(), control
            self._saved = start if start in stored_steps else None
            self.callbacks("on_train_begin", state, control)
            if args.eval_strategy != "no":
                sets = evaluation_sets(self.eval_dataset, "eval")
                readers = {prefix: self._reader(dataset) for prefix, dataset in sets.items()}
                keep = self._keeps_predictions()
                self._evaluator.try_metrics(self.train_state, readers, keep, args)
            if args.eval_on_start and not start:
                self.evaluate()
            shown = self._reports.screen.bar("step", epochs.steps, start, keep=True)
            with shown as bar, preemption_notice() as preemption:
                updates = reader.updates(epochs, start)
                for step in range(start, epochs.steps):
                    if step % epochs.updates == 0:
                        self.callbacks("on_epoch_begin", state, control)
                    self.callbacks("on_step_begin", state, control)
                    update = next(updates)
                    self.train_state, metrics = self._update(update, jax.random.fold_in(key, step))
                    progress.advance(update.rows, update.batch, metrics["loss"])
                    self._saved = None
                    state.global_step, state.epoch = step + 1, (step + 1) / epochs.updates
                    bar()
                    self.callbacks("on_step_end", state, control)
                    due(args, state, control, "steps")
                    preempted = preemption is not None and preemption.notice
                    self._act(folder, bar, preempted)
                    if (step + 1) % epochs.updates == 0 or control.should_training_stop:
                        self.callbacks("on_epoch_end", state, control)
                        due(args, state, control, "epoch")
                        self._act(folder, bar, preempted)
                    if preempted:
                        self._save(folder, {})
                        folder.checkpoints.wait()
                        raise SystemExit(PREEMPTED)
                    if control.should_training_stop:
                        break
            folder.checkpoints.wait()
            last = folder.checkpoints.latest_step()
            best = folder.checkpoints.best_step() if args.load_best_model_at_end else None
            if best is not None:
                self.train_state, self._saved, last = None, best, best
                self.train_state = folder.checkpoints.restore(self._abstract(), best)
                state.best_model_checkpoint = folder.path(best)
            checkpoint = None if last is None else folder.path(last)
        figures = self._reports.end(state.global_step - start, checkpoint, state, control)
        self.callbacks("on_train_end", state, control)
        return TrainOutput(state.global_step, figures["train_loss"], figures)

    def _act(self, folder: RunFolder, bar: Callable[..., None], preempted: bool) -> None:
        """Logs, evaluates and saves where the flags call for it, and resets them.

        A preempted run has no time for an evaluation.
        """
        state, control = self.state, self.control
        if control.should_log:
            self._reports.update(self.train_state, state, control, bar)
        scores = self.evaluate() if control.should_evaluate and not preempted else {}
        is_best = state.improve(scores, self.args)
        if scores and self.args.save_strategy == "best":
            control.should_save = is_best
        if control.should_save:
            self._save(folder, scores)
        if control.should_evaluate or control.should_save:
            self._reports.progress.restart()
        control.should_log = control.should_evaluate = control.should_save = False

    def _save(self, folder: RunFolder, scores: Mapping[str, float]) -> None:
        """Saves a checkpoint, unless one stores the current state."""
        if self._saved != self.state.global_step:
            folder.save(
                self.train_state, self.state, [*map(float, self._reports.progress.losses)], scores
            )
            self._saved = self.state.global_step
            self.callbacks("on_save", self.state, self.control)

    def evaluate(
        self,
        eval_dataset: data.AnyDataset | Mapping[str, data.AnyDataset] | str | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Returns the loss and metrics of all rows; rows that pad the last batch do not count.

        Args:
          eval_dataset: A dataset, a dict of datasets, or the name of one of the Trainer's; by
            default the Trainer's ``eval_dataset``.
          metric_key_prefix: The prefix of the metrics' names; for a dict of datasets, the prefix of
            each is followed by its name.
        """
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = sets[dataset]
        found: dict[str, float] = {}
        for prefix, each in evaluation_sets(dataset, metric_key_prefix).items():
            reader = self._reader(each, "eval_dataset")
            metrics = self._run(reader, prefix, self._keeps_predictions()).metrics
            self._reports.evaluation(metrics, prefix, self.state, self.control)
            self.callbacks("on_evaluate", self.state, self.control, metrics=metrics)
            found |= metrics
        return found

    def _run(self, reader: data.Reader, prefix: str, keep: bool) -> PredictionOutput:
        """Evaluates a dataset, with a bar."""
        train_state = self._ready()
        with self._reports.screen.bar(prefix, length_hint(reader.dataset) or None) as bar:

            def done(rows: int) -> None:
                bar(rows)
                self.callbacks("on_prediction_step", self.state, self.control)

            return self._evaluator.run(train_state, reader, prefix, keep, done=done)

    def predict(
        self, test_dataset: data.AnyDataset, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Returns predictions for all rows, in order, and the metrics if there are labels."""
        output = self._run(self._reader(test_dataset), metric_key_prefix, True)
        self.callbacks("on_predict", self.state, self.control, metrics=output.metrics)
        return output

    def save_model(
        self, output_dir: str | os.PathLike[str] | None = None, **options: Any
    ) -> pathlib.Path:
        """Writes a folder that transformers loads.

        For the models of ``zerojax.models`` the folder has Hugging Face's tensor names, the
        ``config.json`` and ``generation_config.json`` from which the model's config was read, with
        the fields that changed, and the files of the tokenizer: of ``processing_class``, of the
        collator's, or those beside the ``config.json``. Other models have flax's names.

        Args:
          output_dir: The folder; by default ``model`` in the run's ``output_dir``. Files of an
            earlier save are replaced, others are kept.
          **options: ``names``, ``config`` and other options of :func:`zerojax.checkpoint.export`.
        """
        out = pathlib.Path(output_dir or pathlib.Path(self.args.output_dir, "model"))
        holders = (self.processing_class, self._collator)
        saved = pathlib.Path(self.args.output_dir, "checkpoints", str(self._saved))
        found = call_on_first("save_model", lambda: str(saved) if saved.is_dir() else "")
        with contextlib.ExitStack() as stack:
            if not found:  # the step was not saved, or its save still runs
                step, config = self.state.global_step, self._config
                found = stack.enter_context(
                    temporary_checkpoint(self.args, self.zero, self._ready(), step, config)
                )
            write = partial(write_model, found, out, self._config, holders, **options)
            call_on_first("save_model", write, LONGEST)
        return out

    def _reader(self, dataset: Any, name: str = "the dataset") -> data.Reader:
        data.check(name, dataset)
        args, micro_batch = self.args, self.epochs.batch // self.args.gradient_accumulation_steps
        return data.Reader(
            dataset, multiple=micro_batch if args.dataloader_drop_last else 1,
            collator=self._collator, mesh=self.zero.mesh, numbers_only=args.remove_unused_columns,
            check=self._limits.check,
        )  # fmt: skip

    def _partial(self, rows: int) -> Partial:
        return Partial(rows, self.epochs.batch, self.args.gradient_accumulation_steps)

    def _check_last(self, reader: data.Reader) -> None:
        """Checks that an epoch's last update, if it is not full, has a loss.

        Raises:
          ValueError: It has none.
        """
        last = self.epochs.last
        if last is not None and self.args.gradient_accumulation_steps > 1:
            check_partial(self._model, reader.sample(), self._partial(last))

    def _update(self, update: data.Update, key: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
        """Runs an update; returns the next state and the step's metrics."""
        partial = None if update.counts is None else self._partial(update.rows)
        batch = update.batch if partial is None else (update.batch, update.counts)
        return self._step(*objects(self.train_state), batch, key, partial=partial)

    def _sample(self) -> data.Batch:
        dataset = self.train_dataset
        if dataset is None:
            dataset = next(iter(evaluation_sets(self.eval_dataset, "").values()))
        return self._reader(dataset).sample()

    def _abstract(self) -> PyTree:
        return self._initial.abstract(self._sample())

    def _ready(self) -> PyTree:
        if self.train_state is None:
            self.train_state = self._initial.create(self._sample())
        return self.train_state

    def _keeps_predictions(self) -> bool:
        return self._evaluator.compute_metrics is not None and not self.args.prediction_loss_only
