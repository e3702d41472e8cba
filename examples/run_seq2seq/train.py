"""Training, beam search on pairs that training never sees, and the report.

Example::

    report = train(options, console)
    report.bleu, report.samples_per_second, report.losses[-1]
"""

import dataclasses
import json
import time
from collections.abc import Callable

import jax
import numpy as np
from flax.training.train_state import TrainState
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh
from rich.console import Console

from examples.run_clm.devices import data_mesh
from examples.run_clm.progress import Progress, told
from examples.run_seq2seq import model as models
from examples.run_seq2seq.options import Options, check_lengths, configured, optimizer_of
from examples.run_seq2seq.pairs import Pairs, of_files, of_text
from examples.run_seq2seq.report import Report, bleu, summary
from examples.run_seq2seq.steps import search_of, step_of
from examples.run_seq2seq.tokens import Rows, encoded, in_order, shuffled, texts_of
from examples.tables import dataset


def train(options: Options, console: Console) -> Report:
    """Train on some pairs, write the targets of the others, and compare.

    Raises:
      ValueError: An option, a file or the config is wrong.
      OSError: A file does not exist, or `--output_dir` cannot be a folder.
      ImportError: An extra is not installed.
    """
    bleu([""], [""])  # sacrebleu is installed: it is of use at the very end only
    options.output_dir.mkdir(parents=True, exist_ok=True)
    pairs = read(options)
    source = models.find(
        options.model_name_or_path, (text for pair in pairs.train for text in pair)
    )
    check_lengths(options, source.config.max_position_embeddings)
    lengths = options.max_source_length, options.max_target_length, options.pad_to_max_length
    rows, unseen = (encoded(source.tokenizer, some, source.config, *lengths) for some in pairs)

    mesh = data_mesh(options.devices)
    zero, updates, taken = configured(options, mesh, len(pairs.train))
    train_step = zero(step_of(source.model))
    write = zero.evaluate(search_of(source.model, options))
    tx = optimizer_of(options, zero, updates)
    state = models.new_state(zero, source, tx, options.seed)
    console.print(str(zero.plan(state)), markup=False)

    losses, key = [], jax.random.key(options.seed + 1)
    length = rows["input_ids"].shape[1] + rows["labels"].shape[1]
    with Progress(console, updates, done=0, step_tokens=taken * length, mesh=mesh) as progress:
        for step, batch in enumerate(shuffled(rows, taken, updates, options.seed, mesh), 1):
            state, loss = train_step(state, batch, key)
            losses.append(loss)
            progress.advance(step, loss, state)

    started = time.perf_counter()
    targets = written(write, state, unseen, options.per_device_eval_batch_size, mesh)
    seconds = time.perf_counter() - started
    texts = texts_of(source.tokenizer, targets, source.config)
    sources, references = zip(*pairs.held_out, strict=True)
    rate = progress.tokens_per_second / length
    report = Report(
        losses=[float(loss) for loss in losses],
        train_batch=taken // mesh.size,
        eval_batch=options.per_device_eval_batch_size,
        memory=told(progress.peak),
        samples_per_second=rate,
        seconds_an_epoch=len(pairs.train) / rate if rate else 0.0,
        seconds_of_evaluation=seconds,
        bleu_of_sources=bleu([x.removeprefix(options.source_prefix) for x in sources], references),
        bleu=bleu(texts, references),
    )
    console.print(f"\n{sources[0]}\n-> {texts[0]}", markup=False)
    console.print(summary(report))
    if jax.process_index() == 0:
        out = options.output_dir
        (out / "report.json").write_text(json.dumps(dataclasses.asdict(report), indent=1))
        (out / "targets.txt").write_text("".join(f"{text}\n" for text in texts), "utf-8")
    if jax.process_count() == 1:
        models.save(options.output_dir / "model", state.params, source)
    return report


def read(options: Options) -> Pairs:
    """The pairs of files, of a dataset or of a text, as many as the options take."""
    train, held_out, prefix = options.train_file, options.validation_file, options.source_prefix
    if options.dataset_name:
        train = held_out = dataset(options.dataset_name, options.dataset_config_name)
    if train is None or held_out is None:
        pairs = of_text(options.text, options.words, prefix)
    else:
        pairs = of_files(train, held_out, (options.source_column, options.target_column), prefix)
    return Pairs(pairs.train[: options.n_train], pairs.held_out[: options.n_val])


def written(
    write: Callable[..., jax.Array], state: TrainState, rows: Rows, batch: int,
    mesh: Mesh,
) -> np.ndarray:  # fmt: skip
    """The targets of all rows, in their order; `batch` rows a device at a time."""
    batches = in_order(rows, batch * mesh.size, mesh)
    targets = [process_allgather(write(state, some), tiled=True) for some in batches]
    return np.concatenate(targets)
