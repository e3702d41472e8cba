"""Options and functions of `plan` and `fit`, which compile for devices that need not exist."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import typer

from zerojax.foresight.devices import HERE
from zerojax.models.attention import ASKED
from zerojax.models.registry import takes

Model = Annotated[
    str, typer.Option(help="A name, as llama-7b, or module:function for a model of yours.")
]
Devices = Annotated[
    str,
    typer.Option(
        metavar="KIND:N", help="As h100:8, which need not be there; here for those of this machine."
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED",
        help="Between nodes, each way: 400gb (gigabits a second) for each device, 3.2tb/host, or a "
        "name, as ib-ndr or a3-mega; else that of the kind of device.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(ASKED),
        help="Of a model that takes `attention`. auto: mosaic_gpu where tokamax is installed and "
        "the GPUs are Hopper or newer, else plain; cudnn is assumed for GPUs that are absent.",
    ),
]
MeshAxes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=N,...",
        help='Of the devices, outermost first, as data=4,model=2: "model" splits GPTs and Llamas '
        "(tensor parallelism), seq shares a row's tokens, replica adds groups; else all are data.",
    ),
]
Seq = Annotated[int, typer.Option(min=1, help="Tokens in a row.")]
Auto = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help='What stands in for an "auto", as for explain.'),
]


def compile_only(devices: str) -> None:
    """Configures JAX, before its first use, for absent devices: no search for GPUs, no cache of
    compiled programs. Does nothing if the devices exist."""
    if devices == HERE:
        return
    jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would search for GPUs
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back such programs


def with_attention(function: Callable[..., Any], model: str, asked: str | None) -> Any:
    """Returns a model's function with the attention that ``--attention`` asks for.

    Raises:
      ValueError: The model takes no ``attention``, or no attention has that name.
    """
    if asked is None:
        return function
    if not takes(function, "attention"):
        raise ValueError(f"--attention: model {model!r} takes no `attention`")
    if asked not in ASKED:
        raise ValueError(f"--attention: {asked!r} is unknown; there are {', '.join(ASKED)}")
    return functools.partial(function, attention=asked)
