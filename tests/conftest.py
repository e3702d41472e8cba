"""Eight virtual CPU devices for every test, whatever hardware there is."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
