"""The processes of one job: detected, joined, compared, watched, and stopped together."""
