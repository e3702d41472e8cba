"""The view of a jaxpr that all analyses share: producers, users, regions, facts."""
