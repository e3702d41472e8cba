"""What a process of a test imports, once for all of them: the fork server of ``processes.py`` has
imported this module before it forks.

No backend of JAX's may start here, as its threads would not survive the fork.
"""

import zerojax

for name in zerojax.__all__:
    getattr(zerojax, name)
