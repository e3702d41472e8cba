"""Gradient accumulation: a traced step cut into what runs per micro-batch and what runs once."""
