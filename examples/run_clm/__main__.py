"""Train a GPT as a byte-level language model with ZeRO: the main job.

Command, from the repository root::

    python -m examples.run_clm                              # the Python library's own sources
    python -m examples.run_clm --text book.txt --max_train_steps 2000 --output_dir runs/book
    python -m examples.run_clm --config_name small --scan --remat --kernels auto \\
        --per_device_train_batch_size 8
    python -m examples.run_clm --mesh data=4,model=2        # tensor parallelism over pairs
    python -m examples.run_clm --dataset_name wikitext/ --dataset_config_name wikitext-2-raw-v1 \\
        --tokenizer_name vocab.bpe --config_name small --block_size 128 --num_train_epochs 1

With no arguments, on a 2-core CPU machine as 8 virtual devices: 300 steps of a 1.3M GPT at
stage 3 in 97 to 117 s, compilation included (measured with other work on the same cores), at 7,400
to 8,100 tokens/s, with 2.0 MB of arrays on each device, 4.0 while a checkpoint is written. Held-out
loss falls from 5.5 nats a byte (a guess is ln 256) to 2.23 on Python 3.11's library, to 2.35 on
3.12's; above 2.6 something is wrong.

It prints what each device holds (`--verbose` lists every parameter), evaluates on text that it
never trains on, writes a checkpoint in the background at each evaluation, and draws the loss curve
beside it. Run again with the same `--output_dir` it goes on from the newest checkpoint: bit for bit
as if it had not stopped, or to rounding on other devices and at another stage. At SIGTERM it saves
and exits with status 75; a second one ends it at once.
"""

import pathlib
from typing import Annotated

import typer

import zerojax
from examples.command import Command, command
from examples.run_clm.job import DEFAULT_CONFIG, DEFAULT_STEPS, Fused, Job, size_of
from examples.run_clm.train import train
from examples.tracking import ReportTo
from zerojax.checkpoint import PREEMPTED, CheckpointError
from zerojax.models.gpt import SIZES

app = typer.Typer(add_completion=False)


@app.command(cls=Command, help="Train a GPT as a byte-level language model with ZeRO.")
def main(
    more_text: Annotated[list[pathlib.Path] | None, typer.Argument(hidden=True)] = None,
    text: Annotated[
        list[pathlib.Path] | None,
        typer.Option(help="UTF-8 text files; else the Python library's sources"),
    ] = None,
    config: Annotated[
        pathlib.Path, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML")
    ] = DEFAULT_CONFIG,
    dataset_name: Annotated[
        str | None,
        typer.Option(
            help="a folder of .txt, .jsonl, .csv and .parquet files with a column text, or a name "
            "of `datasets`"
        ),
    ] = None,
    dataset_config_name: Annotated[
        str | None, typer.Option(help="a folder within that folder, or a configuration's name")
    ] = None,
    max_train_steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"updates, resumed ones included; else {DEFAULT_STEPS}"),
    ] = None,
    num_train_epochs: Annotated[
        int | None,
        typer.Option(min=1, help="take each block once an epoch; else random windows"),
    ] = None,
    config_name: Annotated[str, typer.Option(help=f"a model: {', '.join(SIZES)}")] = "mini",
    per_device_train_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="rows; else as the config has it, or 16 of all devices"),
    ] = None,
    per_device_eval_batch_size: Annotated[
        int | None, typer.Option(min=1, help="rows; else those of an update")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="bytes or tokens per row; else as the model has it")
    ] = None,
    tokenizer_name: Annotated[
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
        typer.Option(help="fused norms, attention and loss; auto: the faster ones"),
    ] = None,
    output_dir: Annotated[
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
        int | None, typer.Option(min=1, help="steps between checkpoints; else as --eval_every")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="discard the folder's checkpoints")
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(min=1, help="continue from this checkpoint, and discard those after it"),
    ] = None,
    with_tracking: Annotated[
        bool, typer.Option("--with-tracking", help="write the run's figures")
    ] = False,
    report_to: Annotated[
        ReportTo | None, typer.Option(help="where to; else all that are installed")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="list every parameter before the first step")
    ] = False,
) -> None:
    with command(
        ValueError, OSError, ImportError, CheckpointError,
        zerojax.DiskError, zerojax.OutOfMemoryError,
    ) as console:  # fmt: skip
        job = Job(
            text=[*(text or []), *(more_text or [])],
            config=config,
            config_name=config_name,
            block_size=block_size or size_of(config_name)["block_size"],
            scan=scan,
            remat=remat,
            dropout=dropout,
            kernels=kernels,
            output_dir=output_dir,
            seed=seed,
            devices=devices,
            mesh=mesh,
            restart=restart,
            from_step=from_step,
            max_train_steps=max_train_steps,
            num_train_epochs=num_train_epochs,
            per_device_train_batch_size=per_device_train_batch_size,
            per_device_eval_batch_size=per_device_eval_batch_size,
            eval_every=eval_every,
            save_every=save_every,
            dataset_name=dataset_name,
            dataset_config_name=dataset_config_name,
            tokenizer_name=tokenizer_name,
            learning_rate=learning_rate,
            with_tracking=with_tracking,
            report_to=report_to,
            verbose=verbose,
        )
        preempted = train(job, console).preempted
    raise typer.Exit(PREEMPTED if preempted else 0)


if __name__ == "__main__":
    app()
