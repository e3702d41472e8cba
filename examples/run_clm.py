"""Train a GPT as a byte-level language model with ZeRO: the main job.

Command, from the repository root::

    python -m examples.run_clm                              # the Python library's own sources
    python -m examples.run_clm --text book.txt --steps 2000 --out runs/book
    python -m examples.run_clm --model small --scan --remat --batch-size 64 --kernels auto

With no arguments, on a 2-core CPU machine as 8 virtual devices: 300 steps of a 1.3M GPT at
stage 3 in 97 to 117 s, compilation included (measured with other work on the same cores), at 7,400
to 8,100 tokens/s, with 2.0 MB of arrays on each device, 4.0 while a checkpoint is written. Held-out
loss falls from 5.5 nats a byte (a guess is ln 256) to 2.23 on Python 3.11's library, to 2.35 on
3.12's; above 2.6 something is wrong.

It prints what each device holds, evaluates on text that it never trains on, writes a checkpoint in
the background at each evaluation, and draws the loss curve beside it. Run again with the same
`--out` it goes on from the newest checkpoint: bit for bit as if it had not stopped, or to rounding
on other devices and at another stage. At SIGTERM it saves and exits with status 75; a second one
ends it at once.
"""

import dataclasses
import pathlib
from typing import Annotated, Any, NamedTuple

import jax
import typer
from flax.training.train_state import TrainState
from rich.console import Console
from rich.markup import escape

import zerojax
from examples import clm, curve, data, report
from examples.devices import data_mesh
from examples.job import DEFAULT_CONFIG, Fused, Job, size_of
from examples.progress import Progress
from examples.run_folder import History, RunFolder
from zerojax.checkpoint import PREEMPTED, CheckpointError, Preemption
from zerojax.models.gpt import SIZES

EVAL_BATCHES = 4


class Outcome(NamedTuple):
    """Losses of every step, the speed of this run's own steps (0 without any), and whether it was
    told to stop before the last one."""

    history: History
    tokens_per_second: float
    preempted: bool = False


def train(job: Job, console: Console) -> Outcome:
    """The whole job, from text to curve."""
    text = job.read_text()
    mesh = data_mesh(job.devices)
    config = clm.resolved(job, mesh, console)
    rows = job.rows(config, mesh.size)
    zero = zerojax.zero(config, mesh=mesh)
    made, model = clm.workload(job, zero, rows), clm.model(job, zero)
    create_state, train_step = made.create_state, zero(made.train_step)
    batches = data.Batches(text.train, rows, job.block_size, job.seed)
    unseen = data.Batches(text.held_out, rows, job.block_size)
    init_key, dropout_key = jax.random.split(jax.random.key(job.seed))

    @zero.evaluate
    def eval_step(state: TrainState, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        losses: Any = model.apply({"params": state.params}, inputs, targets=targets)
        return losses.mean()

    def held_out_loss(state: TrainState) -> float:
        some = list(unseen.spread(EVAL_BATCHES))
        return sum(float(eval_step(state, batch)) for batch in some) / len(some)

    identity = job.identity(config, rows, text)
    about = dataclasses.asdict(job.model_config) | {"dtype": None}
    options: Any = {"restart": job.restart, "from_step": job.from_step}
    with RunFolder(job.out, zero, identity, about, **options) as folder, Preemption() as preemption:
        history, start = folder.history(), folder.step or 0
        if start >= job.steps:
            console.print(report.already_done(folder, start, job.steps))
            return Outcome(history, 0.0)
        if start:
            dropout_key = folder.key()
            state = folder.restore(zero.abstract_state(create_state, init_key))
            console.print(f"Continuing from step {start} in {folder.checkpoints}")
        else:
            state = zero.init(create_state, init_key)
        console.print(str(zero.plan(state)), markup=False)
        console.print(report.bytes_by_stage(config, mesh, create_state, init_key))

        tokens = rows * job.block_size
        with Progress(console, job.steps, done=start, step_tokens=tokens, mesh=mesh) as progress:
            if start == 0:
                history.held_out.append((0, held_out_loss(state)))
                progress.held_out(*history.held_out[-1])
            for step in range(start, job.steps):
                key = jax.random.fold_in(dropout_key, step)
                state, metrics = train_step(state, batches.batch_at(step), key)
                history.train.append(metrics["loss"])
                done = step + 1
                progress.advance(done, metrics["loss"], state)
                if done % job.eval_every == 0 or done == job.steps:
                    history.held_out.append((done, held_out_loss(state)))
                    progress.held_out(*history.held_out[-1])
                stop = preemption.notice or done == job.steps
                if stop or done % job.save_every == 0:
                    trouble = folder.save(done, state, history, dropout_key)
                    if trouble:
                        console.print(report.not_saved(trouble))
                if stop:
                    break
        folder.wait()
        outcome = Outcome(history, progress.tokens_per_second, preempted=done < job.steps)
        curve.draw(folder.curve, history, report.title(job, config, mesh))
        if outcome.preempted:
            console.print(report.preempted(folder, job.steps))
        else:
            console.print(report.summary(history, progress, folder))
        return outcome


app = typer.Typer(add_completion=False)


@app.command(help="Train a GPT as a byte-level language model with ZeRO.")
def main(
    more_text: Annotated[list[pathlib.Path] | None, typer.Argument(hidden=True)] = None,
    text: Annotated[
        list[pathlib.Path] | None,
        typer.Option(help="UTF-8 text files; else the Python library's sources"),
    ] = None,
    config: Annotated[pathlib.Path, typer.Option(help="DeepSpeed JSON")] = DEFAULT_CONFIG,
    steps: Annotated[int, typer.Option(min=1, help="updates in all, resumed ones included")] = 300,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SIZES)}")] = "mini",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="rows per update, over all devices; else the config, or 16"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="bytes per row; else as the model has it")
    ] = None,
    scan: Annotated[bool, typer.Option(help="compile one block, not one per layer")] = False,
    remat: Annotated[bool, typer.Option(help="recompute blocks in the backward pass")] = False,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    kernels: Annotated[
        Fused | None,
        typer.Option(help="fused norms, activations, attention and loss; auto: the faster ones"),
    ] = None,
    out: Annotated[
        pathlib.Path, typer.Option(help="checkpoints and the curve; continued from if there")
    ] = pathlib.Path("runs/clm"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
    devices: Annotated[
        int | None, typer.Option(min=1, help="how many; else all, or 8 virtual ones on a CPU")
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(min=1, help="steps between evaluations and checkpoints; else a tenth"),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="steps between checkpoints; else as --eval-every")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="discard --out's checkpoints")] = False,
    from_step: Annotated[
        int | None,
        typer.Option(min=1, help="continue from this checkpoint, and discard those after it"),
    ] = None,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    every = eval_every or max(1, steps // 10)
    status = 0
    try:
        job = Job(
            text=[*(text or []), *(more_text or [])],
            config=config,
            steps=steps,
            model=model,
            batch_size=batch_size,
            block_size=block_size or size_of(model)["block_size"],
            scan=scan,
            remat=remat,
            dropout=dropout,
            kernels=kernels,
            out=out,
            seed=seed,
            devices=devices,
            eval_every=every,
            save_every=save_every or every,
            restart=restart,
            from_step=from_step,
        )
        status = PREEMPTED if train(job, console).preempted else 0
    except (
        ValueError, PermissionError, CheckpointError, zerojax.DiskError, zerojax.OutOfMemoryError
    ) as error:  # fmt: skip
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        status = 2
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
