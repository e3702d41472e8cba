"""From a source of pairs to a trained classifier and its figures."""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console
from rich.progress import track

import zerojax
from examples.run_clm.data import read_text
from examples.run_clm.devices import data_mesh, device_bytes
from examples.run_glue import data
from examples.run_glue.classifier import Classifier, of_folder, of_size
from examples.run_glue.job import Job
from examples.run_glue.metrics import Result, accuracy, f1
from zerojax.models.deberta import DebertaClassifier


def train(job: Job, console: Console) -> Result:
    """Trains for the job's epochs, with an evaluation before the first and after each."""
    mesh = data_mesh(job.devices)
    if job.output_dir and jax.process_count() > 1:
        raise ValueError("--output_dir writes the model from one process: leave it out in several")
    rows = job.rows(job.zero(mesh, 1).config, mesh.size)
    pairs, held_out = read_pairs(job)
    classes = data.classes([*pairs, *held_out])
    if len(pairs) < rows:
        raise ValueError(
            f"{len(pairs)} pairs to train on, fewer than the {rows} of an update on {mesh.size} "
            "devices: give more, or a smaller --per_device_train_batch_size"
        )
    classifier = classifier_of(job, pairs, len(classes))
    (arrays, cut), (unseen, unseen_cut) = (
        data.encode(some, classifier.tokenizer, job.max_length, classes, job.pad_to_max_length)
        for some in (pairs, held_out)
    )
    console.print(
        f"{len(pairs)} pairs to train on, {len(held_out)} held out, {len(classes)} labels; "
        f"{cut + unseen_cut} cut to {job.max_length} tokens"
    )
    eval_rows = (job.per_device_eval_batch_size or 0) * mesh.size or rows
    own, eval_own = (zerojax.process_rows(n, mesh) for n in (rows, eval_rows))
    per_epoch = len(pairs) // rows
    model = DebertaClassifier(classifier.config)
    steps = max(1, job.num_train_epochs * per_epoch)
    zero = job.zero(mesh, steps)
    tx = job.optimizer(zero, steps)

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def logits_of(params: Any, batch: Any, **options: Any) -> jax.Array:
        inputs = (batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
        logits: Any = model.apply({"params": params}, *inputs, **options)
        return logits

    @zero
    def train_step(state: TrainState, batch: Any, dropout_key: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            options: Any = {"deterministic": False, "rngs": {"dropout": dropout_key}}
            logits = logits_of(params, batch, **options)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    @zero.evaluate
    def predict(state: TrainState, batch: Any) -> jax.Array:
        return logits_of(state.params, batch).argmax(-1)

    def evaluated(state: TrainState) -> tuple[float, float, float]:
        """Accuracy, F1 and seconds."""
        began, predicted = time.perf_counter(), []
        for count, batch in data.in_order(unseen, eval_rows):
            out = predict(state, {name: x[eval_own] for name, x in batch.items()})
            predicted.append(process_allgather(out, tiled=True)[:count])
        guess, labels = np.concatenate(predicted), unseen["labels"]
        scores = accuracy(guess, labels), f1(guess, labels, len(classes))
        return *scores, time.perf_counter() - began

    init_key, dropout_key = jax.random.split(jax.random.key(job.seed))
    state = zero.init(create_state, init_key)
    state = state.replace(params=classifier.loaded(state.params, init_key))
    scores = evaluated(state)
    console.print(f"before training: accuracy {scores[0]:.3f}, F1 {scores[1]:.3f}")
    seconds, timed, step, losses, memory = 0.0, 0, 0, [jnp.nan], 0
    for number in range(job.num_train_epochs):
        losses = []
        batches = data.epoch(arrays, rows, job.seed, number)
        shown: dict[str, Any] = {"console": console, "disable": not console.is_terminal}
        for batch in track(batches, f"epoch {number + 1}", per_epoch, **shown):
            began = time.perf_counter()
            key = jax.random.fold_in(dropout_key, step)
            own_rows = {name: x[own] for name, x in batch.items()}
            state, loss = train_step(state, own_rows, key)
            losses.append(float(loss))
            if step:  # the first one compiles
                seconds, timed = seconds + time.perf_counter() - began, timed + rows
            step += 1
            memory = max(memory, device_bytes(mesh))
        scores = evaluated(state)
        console.print(
            f"epoch {number + 1}/{job.num_train_epochs}  loss {np.mean(losses):.4f}  "
            f"accuracy [bold]{scores[0]:.3f}[/]  F1 {scores[1]:.3f}"
        )
    if job.output_dir:
        classifier.save(job.output_dir, state.params, classes)
        console.print(
            f"saved in {job.output_dir}, which --model_name_or_path and transformers read"
        )
    rate = timed / seconds if seconds else 0.0
    return Result(
        batch_per_device=rows // mesh.size,
        memory=memory,
        samples_per_second=rate,
        epoch_seconds=per_epoch * rows / rate if rate else 0.0,
        evaluation_seconds=scores[2],
        accuracy=scores[0],
        f1=scores[1],
        chance=np.bincount(unseen["labels"]).max() / len(held_out),
        loss=float(np.mean(losses)),
        skipped=int(zerojax.telemetry(state)["skipped_steps"]) if step else 0,
    )


def read_pairs(job: Job) -> tuple[list[data.Pair], list[data.Pair]]:
    """To train on, and held out: the second file, a dataset's own split, or every tenth row."""
    source = job.dataset or job.train_file
    if source is None:
        texts = [read_text(path).decode() for path in job.text] or [data.docstrings()]
        return data.from_text("\n\n".join(texts), job.seed)
    pairs = data.read(source, job.names, "train")
    folder = pathlib.Path(source)
    splits = not folder.is_dir() or data.tables.files(folder, "validation")
    if job.validation_file or (job.dataset and splits):
        return pairs, data.read(job.validation_file or source, job.names, "validation")
    if len(pairs) < data.HELD_OUT:
        raise ValueError(
            f"{source} has {len(pairs)} rows, of which none can be held out: give rows for "
            "validation too (--validation_file)"
        )
    held_out = pairs[data.HELD_OUT - 1 :: data.HELD_OUT]
    del pairs[data.HELD_OUT - 1 :: data.HELD_OUT]
    return pairs, held_out


def classifier_of(job: Job, pairs: list[data.Pair], labels: int) -> Classifier:
    """The model, once its positions and its tokenizer have proved to fit."""
    if job.folder:
        classifier = of_folder(job.folder, labels, job.remat, job.ignore_mismatched_sizes)
    else:
        texts = (sentence for pair in pairs for sentence in pair[:2])
        classifier = of_size(job.model_name_or_path, texts, labels, job.remat)
    config = classifier.config
    if config.position_biased_input and job.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max_length {job.max_length}, but {job.model_name_or_path} has positions for "
            f"{config.max_position_embeddings} tokens"
        )
    return classifier
