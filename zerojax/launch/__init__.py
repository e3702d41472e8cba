"""Processes of a job, placed on machines and supervised; nothing here imports JAX."""
