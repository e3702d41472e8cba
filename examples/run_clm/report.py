"""What the main job says before and after training.

Example::

    console.print(bytes_by_stage(zero, create_state, key))
    console.print(summary(history, progress, folder, job))
"""

import dataclasses
import math
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jax
from rich import box
from rich.markup import escape
from rich.table import Table

import zerojax
from examples.run_clm.job import Job
from examples.run_clm.progress import Progress, told
from examples.run_clm.run_folder import History, RunFolder
from examples.run_clm.workload import specs_on

GATHERED = ("replicated", "gathered once a step", "gathered once a step", "gathered where used")
AWAY = {"host": "in host memory", "disk": "on disk"}


def bytes_by_stage(
    zero: zerojax.Zero, create_state: Callable[[jax.Array], Any], key: jax.Array
) -> Table:
    """Bytes on one device at each ZeRO stage, from the plans alone; where the config offloads,
    bytes in host memory and on disk too."""
    config, mesh = zero.config, zero.mesh
    zeros = [
        zerojax.zero(at_stage(config, stage), mesh=mesh, specs=specs_on(mesh))
        for stage in range(len(GATHERED))
    ]
    plans = [zero.plan(zero.abstract_state(create_state, key)) for zero in zeros]
    away = [place for place in AWAY if any(sum(bytes_in(p, place)) for p in plans)]
    heading = f"Bytes on each of {mesh.size} devices, by stage"
    heading += f", and for it {' and '.join(AWAY[place] for place in away)}" if away else ""
    table = Table(
        title=heading,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for column in ("stage", "at rest", "gradients", "together", "share", *away):
        table.add_column(column, justify="right")
    table.add_column("parameters", no_wrap=True)
    replicated = sum(bytes_in(plans[0], "device"))
    for stage, (plan, gathered) in enumerate(zip(plans, GATHERED, strict=True)):
        rest, grads = bytes_in(plan, "device")
        table.add_row(
            f"{'→ ' * (stage == config.stage)}{stage}",
            *(size(n) for n in (rest, grads, rest + grads)),
            f"{(rest + grads) / replicated:.1%}",
            *(size(sum(bytes_in(plan, place))) for place in away),
            gathered,
            style="bold" if stage == config.stage else "",
        )
    return table


def at_stage(config: zerojax.ZeroConfig, stage: int) -> zerojax.ZeroConfig:
    """The config at another stage, with as much of its offload, its partitions and its quantized
    collectives as that stage can have."""
    some = stage >= 1
    return dataclasses.replace(
        config,
        stage=stage,
        offload_optimizer=config.offload_optimizer if some else None,
        offload_param=config.offload_param if stage >= 3 else None,
        zero_hpz_partition_size=config.zero_hpz_partition_size if stage >= 3 else 1,
        fp8=config.fp8 if stage >= 3 else None,
        zero_quantized_weights=config.zero_quantized_weights and some,
        zero_quantized_nontrainable_weights=config.zero_quantized_nontrainable_weights and some,
        zero_quantized_gradients=config.zero_quantized_gradients and some,
    )


def bytes_in(plan: zerojax.Plan, place: str) -> tuple[int, int]:
    """Bytes of one device in a place: at rest (the state, and copies in the compute dtype), and
    of gradients."""
    copies, grads = (
        sum(leaf.bytes_per_device for leaf in leaves if leaf.place == place)
        for leaves in (plan.copies(), plan.gradients())
    )
    return plan.bytes_in(place) + copies, grads


def size(n_bytes: int) -> str:
    """Three digits in powers of 1000.

    Example: size(1_235_152_404) == "1.24 GB".
    """
    power = min(int(math.log10(max(n_bytes, 1))) // 3, 4)
    return f"{n_bytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def title(job: Job, zero: zerojax.Zero) -> str:
    """The curve's title."""
    kind = zero.mesh.devices.flat[0].device_kind
    files = ", ".join(path.name for path in job.text)
    text = files or job.dataset_name or "the Python library's sources"
    devices = f"{zero.mesh.size} x {kind}"
    return f"GPT {job.config_name} on {text}\nZeRO stage {zero.config.stage}, {devices}"


def already_done(folder: RunFolder, done: int, steps: int) -> str:
    """For a run that is asked for no more than it has."""
    return (
        f"{folder.checkpoints} has {done} steps, and {steps} were asked for: nothing to do. "
        f"--max_train_steps {2 * done} goes on from there, --restart begins again."
    )


def not_saved(trouble: str) -> str:
    """For a checkpoint that could not be written."""
    return f"[bold red]not saved, going on:[/] {escape(trouble)}"


def preempted(folder: RunFolder, steps: int) -> str:
    """For a run that was told to stop."""
    return (
        f"stopped by SIGTERM after {folder.step}/{steps} steps, which are saved in "
        f"{folder.checkpoints}: the same command goes on from there"
    )


def summary(history: History, progress: Progress, folder: RunFolder, job: Job) -> str:
    """Held-out loss before -> after, exp of it (perplexity), tokens/s, peak bytes per device; the
    files that were written; the command that reads them."""
    before, after = history.held_out[0][1], history.held_out[-1][1]
    lines = [
        f"held-out loss {before:.3f} -> [bold]{after:.3f}[/] | "
        f"perplexity {math.exp(after):.4g} | {progress.tokens_per_second:,.0f} tokens/s | "
        f"{told(progress.peak)}",
        f"wrote the checkpoint {job.output_dir}/checkpoints/{folder.step} and the curve "
        f"{job.output_dir}/{folder.curve.name}",
    ]
    if job.tokenizer_name is None:
        command = [sys.executable.removeprefix(f"{pathlib.Path.cwd()}/"), "-m", "examples.generate"]
        command += ["--run", str(job.output_dir), "--prompt", "import "]
        lines.append(f"next: {shlex.join(command)}")
    return "\n".join(lines)
