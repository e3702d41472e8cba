"""Shared by the tests of searches."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A program of several tests is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("measured")))
        yield
