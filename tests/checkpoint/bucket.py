"""A bucket of Google Cloud on this machine: gcp-storage-emulator, and what it leaves out."""

import contextlib
import importlib.util
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from zerojax.launch.job import free_port

NAME = "checkpoints"

require = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("gcsfs", "gcp_storage_emulator"))),
    reason="needs the `test` extra",
)


@contextlib.contextmanager
def served(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, for this process and those that it starts."""
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator.handlers import objects

    plain = objects.download

    def download(request: Any, response: Any, storage: Any, *rest: Any, **more: Any) -> None:
        """With the object's generation, which tensorstore compares and the emulator leaves out."""
        plain(request, response, storage, *rest, **more)
        if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            name = request.params["bucket_name"], request.params["object_id"]
            response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]

    patch.setattr(objects, "download", download)
    for _, methods in emulator.HANDLERS:
        for method in [m for m, handler in methods.items() if handler is plain]:
            patch.setitem(methods, method, download)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    patch.setenv("STORAGE_EMULATOR_HOST", url)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    with emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=NAME):
        yield f"gs://{NAME}"
