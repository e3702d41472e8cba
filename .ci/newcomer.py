"""README's lines in their order, as a newcomer runs them, in the environment that runs this file.

Usage: `python newcomer.py README.md`, in an empty folder with README's `configs/` and `examples/`.
Ends with status 1 at the first line that fails, warns, or prints a traceback.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# What the diff leaves to the reader: the model, the loss, the batches.
BEFORE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn
from flax.training.train_state import TrainState

jax.config.update("jax_num_cpu_devices", 8)
key, sample = jax.random.key(0), jnp.zeros((1, 32))
rng = np.random.default_rng(0)
rows = [rng.normal(size=(64, 32)).astype(np.float32) for _ in range(20)]
batches = [{"x": x, "y": x.argmax(axis=-1)} for x in rows]
model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(32)])

def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
"""
AFTER = """
print(f"loss {float(metrics['loss']):.3f}")
assert metrics["loss"] < 3.6
"""


def run(name: str, *command: str) -> None:
    print(f"+ {name}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    print(*[f"    {line}" for line in done.stdout.splitlines()[-3:]], sep="\n", flush=True)
    output = done.stdout + done.stderr
    if done.returncode or re.search(r"warning|traceback", output, re.IGNORECASE):
        sys.exit(f"{name}: status {done.returncode}\n{output}")


def program(name: str, *parts: str) -> None:
    Path("program.py").write_text("".join(parts))
    run(name, sys.executable, "-W", "error", "program.py")


def shell(command: str) -> None:
    run(command, "bash", "-c", command.removeprefix(".venv/bin/"))


def main(readme: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    Path("train.py").write_text(Path("examples/minimal.py").read_text())
    diff = re.search(r"^```diff\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[1]
    lines = [(line[:1], f"{line[1:]}\n") for line in diff.splitlines()]
    program("the program before", BEFORE, *[text for mark, text in lines if mark != "+"], AFTER)
    program("the ten lines", BEFORE, *[text for mark, text in lines if mark != "-"], AFTER)
    example = re.search(r"`JAX_PLATFORMS=cpu (.venv/bin/python examples/minimal.py)`", readme)[1]
    shell(example)
    shell("python -m zerojax launch --nproc-per-node 2 train.py")
    shell(re.search(r"`(.venv/bin/python -m zerojax plan .*?)`", readme)[1])
    run("zerojax report", "zerojax", "report")


main(Path(sys.argv[1]).read_text())
