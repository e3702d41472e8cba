"""Gradient accumulation: a traced step split into what runs per micro-batch and what runs once."""
