"""Processes that are one job: found, joined, compared, watched, and stopped together."""
