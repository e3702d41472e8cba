"""How commands that compile for devices that need not exist set up JAX."""

import jax


def compile_only() -> None:
    """Set up JAX before its first use: no search for GPUs, no cache of compiled programs."""
    jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would look for GPUs
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back what is not run
