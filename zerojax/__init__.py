"""ZeRO for JAX."""
