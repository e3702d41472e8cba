"""Train a GPT as a byte-level language model with ZeRO: the main job.

Command, from the repository root::

    python -m examples.run_clm                              # the Python library's own sources
    python -m examples.run_clm --text book.txt --steps 2000 --out runs/book
    python -m examples.run_clm --model small --scan --remat --batch-size 64 --kernels auto
    python -m examples.run_clm --mesh data=4,model=2        # tensor parallelism over pairs
    python -m examples.run_clm --text wiki.txt --tokenizer vocab.bpe --model small --block-size 128

With no arguments, on a 2-core CPU machine as 8 virtual devices: 300 steps of a 1.3M GPT at
stage 3 in 97 to 117 s, compilation included (measured with other work on the same cores), at 7,400
to 8,100 tokens/s, with 2.0 MB of arrays on each device, 4.0 while a checkpoint is written. Held-out
loss falls from 5.5 nats a byte (a guess is ln 256) to 2.23 on Python 3.11's library, to 2.35 on
3.12's; above 2.6 something is wrong.

It prints what each device holds (`--verbose` lists every parameter), evaluates on text that it
never trains on, writes a checkpoint in the background at each evaluation, and draws the loss curve
beside it. Run again with the same
`--out` it goes on from the newest checkpoint: bit for bit as if it had not stopped, or to rounding
on other devices and at another stage. At SIGTERM it saves and exits with status 75; a second one
ends it at once.
"""

import pathlib
from typing import Annotated

import typer

import zerojax
from examples.command import command
from examples.run_clm.job import DEFAULT_CONFIG, Fused, Job, size_of
from examples.run_clm.train import train
from zerojax.checkpoint import PREEMPTED, CheckpointError
from zerojax.models.gpt import SIZES

app = typer.Typer(add_completion=False)


@app.command(help="Train a GPT as a byte-level language model with ZeRO.")
def main(
    more_text: Annotated[list[pathlib.Path] | None, typer.Argument(hidden=True)] = None,
    text: Annotated[
        list[pathlib.Path] | None,
        typer.Option(help="UTF-8 text files; else the Python library's sources"),
    ] = None,
    config: Annotated[
        pathlib.Path, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML")
    ] = DEFAULT_CONFIG,
    steps: Annotated[int, typer.Option(min=1, help="updates in all, resumed ones included")] = 300,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SIZES)}")] = "mini",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="rows per update, over all devices; else the config, or 16"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="bytes or tokens per row; else as the model has it")
    ] = None,
    tokenizer: Annotated[
        pathlib.Path | None,
        typer.Option(help="a folder with tokenizer.json, or GPT-2's vocab.bpe; else bytes"),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help='where the config has "auto"; else 1e-3')
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
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help='axes of the devices, as data=4,model=2: "model" cuts the model; else all are '
            '"data"',
        ),
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="list every parameter before the first step")
    ] = False,
) -> None:
    every = eval_every or max(1, steps // 10)
    with command(
        ValueError, FileNotFoundError, PermissionError, CheckpointError, zerojax.DiskError,
        zerojax.OutOfMemoryError,
    ) as console:  # fmt: skip
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
            mesh=mesh,
            eval_every=every,
            save_every=save_every or every,
            restart=restart,
            from_step=from_step,
            tokenizer=tokenizer,
            learning_rate=learning_rate,
            verbose=verbose,
        )
        preempted = train(job, console).preempted
    raise typer.Exit(PREEMPTED if preempted else 0)


if __name__ == "__main__":
    app()
