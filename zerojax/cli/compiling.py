"""How commands that compile for devices that need not be there set up JAX."""

import os

import jax


def compile_only() -> None:
    """Before JAX is used: no GPU is looked for, and XLA is quiet."""
    jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would look for GPUs
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back what is not run
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in (None, "1"):  # jax sets 1
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA warns of programs that do not fit
