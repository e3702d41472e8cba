"""The main job: from text to a trained model and its curve.

Example::

    outcome = train(Job(config_name="mini", ...), rich.console.Console())
    outcome.history.held_out[-1]                            # (300, 2.23): steps, nats a byte
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from flax.training.train_state import TrainState
from rich.console import Console

import zerojax
from examples.run_clm import curve, data, report
from examples.run_clm.auto import resolved, steps_of
from examples.run_clm.devices import data_mesh, row_devices
from examples.run_clm.job import Job
from examples.run_clm.progress import Progress
from examples.run_clm.run_folder import History, RunFolder
from examples.run_clm.workload import eval_step_of, specs_on, workload
from examples.tracking import monitors
from zerojax.checkpoint import Preemption

EVAL_BATCHES = 4


class Outcome(NamedTuple):
    """What a run leaves to its caller.

    Attributes:
      history: losses, of the steps before this run too.
      tokens_per_second: of this run's own steps; 0 where it made none.
      preempted: it was told to stop before the last step.
    """

    history: History
    tokens_per_second: float
    preempted: bool = False


def train(job: Job, console: Console) -> Outcome:
    """Train from the newest checkpoint, or from the beginning, to the job's last step.

    An evaluation takes `EVAL_BATCHES` batches of an update's rows, or as many rows or more in
    batches of `--per_device_eval_batch_size`.
    """
    text = job.read_text()
    mesh = data_mesh(job.devices, job.mesh)
    steps = steps_of(job, text, mesh)
    eval_every = job.eval_every or max(1, steps // 10)
    save_every = job.save_every or eval_every
    zero = resolved(job, mesh, steps, console)
    if tracked := monitors(job.with_tracking, job.report_to, job.output_dir):
        config = dataclasses.replace(zero.config, **tracked)
        zero = zerojax.zero(config, mesh=mesh, specs=specs_on(mesh))
    rows = job.rows(zero.config, row_devices(mesh))
    work = workload(job, zero, rows)
    train_step = zero(work.train_step)
    eval_step = zero.evaluate(eval_step_of(job, zero))
    in_epochs = job.num_train_epochs is not None
    own = zerojax.process_rows(rows, mesh)
    batches = data.Batches(text.train, rows, job.block_size, job.seed, own, in_epochs)
    eval_rows = (job.per_device_eval_batch_size or 0) * row_devices(mesh) or rows
    eval_own = zerojax.process_rows(eval_rows, mesh)
    held_out = data.Batches(text.held_out, eval_rows, job.block_size, own=eval_own)
    unseen = list(held_out.spread(-(-EVAL_BATCHES * rows // eval_rows)))
    init_key, dropout_key = jax.random.split(jax.random.key(job.seed))

    def held_out_loss(state: TrainState) -> float:
        return sum(float(eval_step(state, batch)) for batch in unseen) / len(unseen)

    identity = job.identity(zero.config, rows, text)
    about = dataclasses.asdict(job.model_config) | {"dtype": None}
    options: Any = {"restart": job.restart, "from_step": job.from_step}
    with (
        RunFolder(job.output_dir, zero, identity, about, **options) as folder,
        Preemption() as preemption,
    ):
        history, start = folder.history(), folder.step or 0
        if start >= steps:
            console.print(report.already_done(folder, start, steps))
            return Outcome(history, 0.0)
        if start:
            dropout_key = folder.key()
            state = folder.restore(zero.abstract_state(work.create_state, init_key))
            console.print(f"Continuing from step {start} in {folder.checkpoints}")
        else:
            state = zero.init(work.create_state, init_key)
        console.print(report.bytes_by_stage(zero, work.create_state, init_key))
        plan = zero.plan(state)
        console.print(plan.table() if job.verbose else repr(plan), markup=False)

        tokens = rows * job.block_size
        with Progress(console, steps, done=start, step_tokens=tokens, mesh=mesh) as progress:
            if start == 0:
                history.held_out.append((0, held_out_loss(state)))
                progress.held_out(*history.held_out[-1])
            for step in range(start, steps):
                key = jax.random.fold_in(dropout_key, step)
                state, metrics = train_step(state, batches.batch_at(step), key)
                history.train.append(metrics["loss"])
                done = step + 1
                progress.advance(done, metrics["loss"], state)
                if done % eval_every == 0 or done == steps:
                    history.held_out.append((done, held_out_loss(state)))
                    progress.held_out(*history.held_out[-1])
                stop = preemption.notice or done == steps
                if stop or done % save_every == 0:
                    trouble = folder.save(done, state, history, dropout_key)
                    if trouble:
                        console.print(report.not_saved(trouble))
                if stop:
                    break
        folder.wait()
        outcome = Outcome(history, progress.tokens_per_second, preempted=done < steps)
        if jax.process_index() == 0:
            curve.draw(folder.curve, history, report.title(job, zero))
        if outcome.preempted:
            console.print(report.preempted(folder, steps))
        else:
            console.print(report.summary(history, progress, folder, job), soft_wrap=True)
        return outcome
