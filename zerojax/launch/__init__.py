"""Processes of a job, placed on machines and supervised; no module here imports JAX."""
