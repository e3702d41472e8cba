"""The main job's model goes on with a prompt: text comes to the terminal as its bytes are drawn.

Command, from the repository root::

    python -m examples.run_clm                                       # a checkpoint in runs/clm
    python -m examples.generate --run runs/clm --prompt "import "
    python -m examples.generate --run runs/clm --prompt "def " --temperature 0      # no draws

It takes 13 CPU seconds, most of them before the first byte: imports, restore, compilation. Of a
checkpoint it reads only the parameters, on whatever devices there are, also while the job trains.
After 300 steps on the Python library's sources the text has their look, and words that hardly
exist; the second command prints (on another machine other bytes)::

    import turd]

                                     ytupprocoupt.pptietucrstt(s):
                              in stf.confiss:
"""

import codecs
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import zerojax
from examples.command import Command, command
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.models.gpt import GPT, GPTConfig

END = 0  # the byte after each document
BYTES = 256

app = typer.Typer(add_completion=False)


def restored(run: pathlib.Path) -> tuple[GPT, Any, str]:
    """Returns a run's model, the parameters of its newest checkpoint, sharded as at stage 3, and
    the fingerprint of its text."""
    if not run.is_dir():
        raise ValueError(
            f"--run {run} is not a folder: name the --output_dir of python -m examples.run_clm"
        )
    zero = zerojax.zero(stage=3)
    with Checkpointer(run / "checkpoints", zero, read_only=True) as checkpointer:
        step = checkpointer.latest_step()
        if step is None:
            raise ValueError(
                f"--run {run} has no checkpoint: write one with python -m examples.run_clm "
                f"--output_dir {run}"
            )
        saved = checkpointer.extra(step, process=0) or {}
        if not {"model", "run"} <= saved.keys():
            raise ValueError(
                f"--run {run} holds checkpoints of another program: name the --output_dir of "
                "python -m examples.run_clm"
            )
        text = saved["run"]["identity"]["text"]
        if " bytes, " not in text:
            raise ValueError(
                f"--run {run} was trained on a tokenizer's tokens, and this example writes bytes: "
                "name a run without --tokenizer_name, or pass its tokens to zerojax.generate"
            )
        model = GPT(GPTConfig(**saved["model"]))

        def create_params(key: jax.Array) -> Any:
            return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

        params = zero.abstract_state(create_params, jax.random.key(0))
        return model, checkpointer.restore(params, step), text


def continuation(
    model: GPT, params: Any, prompt: str, max_new_tokens: int | None = None, **how: Any
) -> Iterator[str]:
    """Yields the characters after a prompt, up to the end of a document.

    Args:
      model, params: A model of bytes and its parameters.
      prompt: The text to continue.
      max_new_tokens: The most new bytes; by default those that fit into the model's block.
      how: Further arguments of `zerojax.generate_stream`.

    Raises:
      ValueError: The prompt is empty or does not leave room for a byte, or an option is wrong.
    """
    tokens, block = prompt.encode("utf-8", "surrogateescape"), model.config.block_size
    if not tokens:
        raise ValueError("--prompt is empty: write at least one character")
    if len(tokens) >= block:
        raise ValueError(
            f"--prompt has {len(tokens)} bytes and the model a block of {block}: shorten it to "
            f"{block - 1} or less, or train with a larger --block_size"
        )
    new = block - len(tokens) if max_new_tokens is None else max_new_tokens
    stream = zerojax.generate_stream(
        model, params, [list(tokens)], max_new_tokens=new, eos=END, **how
    )
    return _characters(stream)


def _characters(stream: Iterator[np.ndarray]) -> Iterator[str]:
    """Yields text as soon as its bytes are complete; what is not UTF-8 as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for (token,) in stream:
        if token == END:
            break
        yield decoder.decode(bytes([token]) if token < BYTES else b"\xff")
    yield decoder.decode(b"", final=True)


@app.command(cls=Command, help="Continue a prompt with the newest checkpoint of the main job.")
def main(
    prompt: Annotated[str, typer.Option(help="the text to continue")],
    run: Annotated[
        pathlib.Path, typer.Option(help="--output_dir of examples.run_clm")
    ] = pathlib.Path("runs/clm"),
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="bytes; else what fits the model's block")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable byte")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="draw from the k most probable bytes")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw from the fewest bytes of this probability")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    with command(ValueError, OSError, CheckpointError) as console:
        model, params, _ = restored(run)
        text = continuation(
            model, params, prompt, max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, key=jax.random.key(seed),
        )  # fmt: skip
        console.out(prompt, end="")
        for characters in text:
            console.out(characters, end="")
        console.out("")


if __name__ == "__main__":
    app()
