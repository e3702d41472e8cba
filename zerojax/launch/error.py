"""The error of a launch that cannot begin."""


class UsageError(ValueError):
    """The options, the hostfile or this machine do not allow the launch; the message says why."""
