"""The table of the guides: every row has an answer, and what it names exists and says so."""

import json
import re
from pathlib import Path

import pytest

from zerojax.config.explain import NOT_GIVEN, explain

ROOT = Path(__file__).parents[1]
STATUSES = {"same", "other spelling", "not needed", "not supported"}
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "guides.md").read_text().splitlines()
    if line.startswith("| ") and not re.match(r"\| (---|the guide says) ", line)
]
SAYS = [match.groups() for row in ROWS for match in re.finditer(r"`(\{.*\})`: ([\w ]+)", row[-1])]


def test_every_row_has_an_answer_and_something_that_shows_it() -> None:
    assert len(ROWS) > 100
    for guide, here, status, shown in ROWS:
        assert guide, here
        assert here, guide
        assert status in STATUSES, guide
        for name in re.findall(r"`((?:tests|docs)/[^`]+)`", shown):
            path, _, test = name.partition("::")
            assert (ROOT / path).is_file(), name
            assert f"def {test}" in (ROOT / path).read_text(), name
        assert re.search(r"`(tests/|docs/|\{)", shown), guide


@pytest.mark.parametrize(("config", "became"), SAYS)
def test_a_config_is_explained_as_the_table_says(config: str, became: str) -> None:
    """On 8 devices; of the leaves of the JSON besides the stage at least one."""
    rows = [r for r in explain(json.loads(config), devices=8).rows if not r.key.endswith(".stage")]
    assert became in {row.became for row in rows if row.given is not NOT_GIVEN}
