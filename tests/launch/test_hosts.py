"""DeepSpeed's hostfile and filters."""

import os
import socket
from pathlib import Path

import pytest

from zerojax.launch.error import UsageError
from zerojax.launch.hosts import Host, read_hostfile, select

HOSTS = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2, 3))]


def test_a_hostfile_has_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nworker-0 slots=4  # big\n\tworker-1\tslots=4\n")
    assert read_hostfile(path) == HOSTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a slots=2\nb\n", ":2: expected `HOST slots=N`, got 'b'"),
        ("a slots=2 max=3", ":1: expected `HOST slots=N`"),
        ("a slots=2\n\na slots=2", ":3: a is in line 1 too"),
        ("# none", ": no line names a host"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_hostfile(path)
    assert str(error.value).startswith(f"{path}{says}")


def test_a_hostfile_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write lines `HOST slots"):
        read_hostfile(tmp_path / "hosts")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="no line names a host"):
        read_hostfile(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, HOSTS),
        ("worker-1", None, HOSTS[1:]),
        ("worker-1@worker-0:0,2", None, [Host("worker-0", (0, 2)), HOSTS[1]]),
        ("worker-0:1@worker-0:3", None, [Host("worker-0", (1, 3))]),
        (None, "worker-0", HOSTS[1:]),
        (None, "worker-1:0,1@worker-0:3", [Host("worker-0", (0, 1, 2)), Host("worker-1", (2, 3))]),
    ],
)
def test_filters_are_deepspeed_s(
    include: str | None, exclude: str | None, left: list[Host]
) -> None:
    assert select(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "says"),
    [
        ("worker-0", "worker-1", "--include and --exclude are both given"),
        ("worker-2", None, "--include: 'worker-2' is none of the hosts worker-0, worker-1"),
        (None, "worker-0:4", "--exclude: worker-0 has slots 0 to 3, not 4"),
        ("worker-0:a", None, "expected HOST or HOST:0,2, got 'worker-0:a'"),
        (None, "worker-0@worker-1", "--exclude worker-0@worker-1 leaves no host"),
    ],
)
def test_filters_that_fit_no_host(include: str | None, exclude: str | None, says: str) -> None:
    with pytest.raises(UsageError) as error:
        select(HOSTS, include, exclude)
    assert says in str(error.value)


def test_this_machine_is_known_by_its_names() -> None:
    assert Host("localhost", (0,)).is_here
    assert Host(socket.gethostname(), (0,)).is_here
    assert not Host("worker-0", (0,)).is_here
