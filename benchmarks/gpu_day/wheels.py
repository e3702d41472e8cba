"""The wheels that a GPU machine lacks, gathered where pip has a registry.

    python -m benchmarks.gpu_day.wheels .gpu_day/wheels

The wheels are for CPython 3.12 on x86-64, on a machine that already has jax 0.11.2 with its CUDA
plugin, torch, Triton, transformers and the dependencies of flax, optax and orbax. It lacks hjson
and pydantic with their dependencies, and a flax that works with jax 0.11; Liger is for comparison.
optax and orbax come in the versions of this environment, with which the code was tested. All wheels
together have 6 MB. No wheel of DeepSpeed is published: where its sources build
(``DS_BUILD_OPS=0 pip wheel --no-deps deepspeed``), put the wheel into the same folder.
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
    """The pip command that downloads the wheels into a folder."""
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
