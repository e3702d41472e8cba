"""The wheels that a GPU machine lacks, gathered where pip has a registry.

    python -m benchmarks.gpu_day.wheels .gpu_day/wheels

For CPython 3.12 on x86-64, of a machine that has jax 0.11.2 with its CUDA plugin, torch, Triton,
transformers and what flax, optax and orbax want. What it lacks are hjson and pydantic with their
needs, and a flax that knows jax 0.11; Liger is for comparison. optax and orbax are those that this
code was tested with. All together 6 MB. No wheel of DeepSpeed is published: where its sources build
(``DS_BUILD_OPS=0 pip wheel --no-deps deepspeed``), lay the wheel beside these.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FLAX = "flax==0.12.12"
"""The first that works with jax 0.11.2."""
TESTED = ("optax", "orbax-checkpoint", "hjson", "pydantic", "pydantic-core")
"""In the versions of this environment."""
ANY = ("annotated-types", "typing-inspection", "typing-extensions", "liger-kernel")
_LINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def requirements() -> list[str]:
    """Requirements that are downloaded, each without its dependencies."""
    exact = [f"{name}=={importlib.metadata.version(name)}" for name in TESTED]
    return [FLAX, *exact, *ANY]


def command(folder: Path) -> list[str]:
    """pip's command."""
    platforms = [word for name in _LINUX for word in ("--platform", f"{name}_x86_64")]
    return [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        "--python-version", "3.12", "--implementation", "cp", *platforms,
        "-d", str(folder), *requirements(),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day.wheels", description="What a GPU machine lacks."
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    subprocess.run(command(options.folder), check=True)
    for wheel in sorted(options.folder.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")


if __name__ == "__main__":
    main()
