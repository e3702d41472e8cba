"""The README, the pages of docs/, the configs and the code agree."""

import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import typer
import yaml
from flax.training.train_state import TrainState
from rooms import ROOMS
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import COMMANDS, app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorial.md"
# Each is a namespace of its own, run from top to bottom.
PAGES = [README, ROOT / "configs/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("zerojax", "configs", "tests", "examples", "benchmarks", "pallas_kernels", "docs")

NOT_RUN = 'python title="Not run by the tests: '
"""Begins the info of a block that cannot run here; the reason follows."""
PRINTS = 'text title="prints"'
PRINTS_AMONG_OTHERS = 'text title="prints, shortened"'
"""The info of a block with the output of the block before it, in lines of any length."""
FIGURE = re.compile(r"\d[\d,]*\.?\d*")
COMPILES = "zerojax.topology("
"""Stands in pages whose code compiles for devices that are absent."""

SLOW = {
    "checkpoints.md", "from-maxtext.md", "generation.md", "kernels.md", "long-sequences.md",
    "models.md", "other-hardware.md", "parts-and-copies.md", "speed.md", "trainer.md",
    "tutorial.md", "workloads.md", "wrong-numbers.md",
}  # fmt: skip
"""Pages whose code trains or compiles for seconds."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """Fenced text of a page.

    Attributes:
      info: what stands behind the fence, the language first.
      line: of the page, at which the text begins.
      text: without the fences and their indentation.
    """

    info: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```$", text, re.S | re.M):
        indent, info, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        yield Block(info.strip(), text.count("\n", 0, match.start(3)) + 1, "".join(lines))


def test_readme_is_short_and_starts_with_the_two_commands() -> None:
    text = README.read_text()
    assert len(text.encode()) <= 4500
    results = text.partition("## Results")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert results.count("\n- ") == 2  # three, each with its record
    assert results.count("[record](benchmarks/records/") == 3
    run, test = next(blocks(README)).text.splitlines()
    assert run.endswith("-m examples.run_clm")
    assert "-m pytest" in test
    assert "compile" in test  # the GPU compiles are part of the tests
    assert test == (ROOT / ".ci/test-command").read_text().strip()  # what CI runs


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder in which programs find configs and examples, and may write."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "times"),
    [
        *(
            pytest.param(
                *(page, 1),
                id=str(page.relative_to(ROOT)),
                marks=[
                    *([pytest.mark.gpu_compile] if COMPILES in page.read_text() else []),
                    *([pytest.mark.slow] if page.name in SLOW else []),
                ],
            )
            for page in PAGES
        ),
        pytest.param(
            *(TUTORIAL, 2), id="each cell twice", marks=[pytest.mark.gpu_compile, pytest.mark.sweep]
        ),
    ],
)
@pytest.mark.usefixtures("quick_compile", "clone")
def test_the_code_of_a_page_runs(
    page: Path, times: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each cell of the tutorial may run twice, but the compiles for absent GPUs, on which no later
    cell depends."""
    if COMPILES in page.read_text():
        request.getfixturevalue("gpu_compiler_installed")
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed = ""
    for block in blocks(page):
        if block.info.startswith("python") and not block.info.startswith(NOT_RUN):
            assert block.info == "python", f"{page.name}:{block.line}"
            source = "\n" * (block.line - 1) + block.text  # a traceback has the page's line
            code = compile(source, str(page), "exec")
            capsys.readouterr()
            exec(code, namespace)
            printed = capsys.readouterr().out
            for _ in range(1, times if COMPILES not in block.text else 1):
                exec(code, namespace)
        elif block.info == PRINTS:
            assert_printed(printed, block.text, f"{page.name}:{block.line}")


def assert_printed(printed: str, shown: str, where: str) -> None:
    """The same words, and figures within 2%; the length of a bar follows from its figure."""
    both = [[word for word in text.split() if word.strip("█─")] for text in (printed, shown)]
    words = [[FIGURE.sub("", word) for word in each] for each in both]
    assert words[0] == words[1], where
    figures = [[float(n.replace(",", "")) for n in FIGURE.findall(" ".join(x))] for x in both]
    assert figures[0] == pytest.approx(figures[1], rel=0.02), where


def test_a_figure_that_is_old_is_noticed() -> None:
    assert_printed("stage 3 ███ 2.54 GB", "stage 3 ████ 2.52 GB", "page")
    for old in ("stage 3 ███ 2.95 GB", "stage 1 ███ 2.54 GB", "stage 3 ███ 2.54 MB"):
        with pytest.raises(AssertionError, match="page"):
            assert_printed("stage 3 ███ 2.54 GB", old, "page")


def shortened() -> Iterator[Any]:
    """The command and the lines of it that a page shows."""
    for page in PAGES:
        found = [*blocks(page)]
        for before, block in itertools.pairwise(found):
            if block.info == PRINTS_AMONG_OTHERS:
                (words,) = re.findall(r"^python -m zerojax (.*)", before.text.replace("\\\n", " "))
                yield pytest.param(words, block.text, id=f"{page.name}:{block.line}")


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(("command", "shown"), [*shortened()])
def test_what_a_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": None})
    assert done.exit_code == 0, done.output
    printed = {_words(line): line for line in done.output.splitlines()}
    for line in filter(str.strip, shown.splitlines()):
        assert _words(line) in printed, line
        assert_printed(printed[_words(line)], line, line)


def _words(line: str) -> str:
    """A line without figures, bars and spaces."""
    return re.sub(r"[\d.,█─\s]", "", line)


@pytest.mark.usefixtures("quick_compile", "clone")
def test_both_sides_of_the_readmes_diff_run_and_agree(caplog: pytest.LogCaptureFixture) -> None:
    diff = next(block.text for block in blocks(README) if block.info == "diff")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 8)).astype(np.float32), rng.integers(4, size=16)

    def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    losses = []
    for gone in "+-":
        kept = [line[1:] for line in diff.splitlines() if line[:1] != gone]
        namespace: dict[str, Any] = {
            "jax": jax,
            "optax": optax,
            "TrainState": TrainState,
            "model": nn.Dense(4),
            "sample": x,
            "cross_entropy": cross_entropy,
            "key": jax.random.key(0),
            "batches": [{"x": x, "y": y}] * 3,
        }
        exec("\n".join(kept), namespace)
        losses.append(float(namespace["metrics"]["loss"]))
    assert [record.getMessage() for record in caplog.records if record.name == "zerojax"] == []
    before, after = losses
    assert after == pytest.approx(before, rel=0.02)  # the config computes in bf16, and warms up


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("at", [1, 2, 3])
def test_both_sides_of_a_program_from_plain_jit_agree(at: int) -> None:
    """Three lines change, and ``import zerojax``."""
    page = ROOT / "docs" / "from-plain-jit.md"
    lines = [block.text for block in blocks(page) if block.info == "diff"][at].splitlines()
    assert len([line for line in lines if line[:1] == "+"]) == 4
    losses = []
    for gone in "+-":
        names: dict[str, Any] = {}
        exec("\n".join(line[1:] for line in lines if line[:1] != gone), names)
        losses.append(np.asarray(names["losses"]))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_the_readmes_program_runs_as_written(compiled_in: dict[str, str]) -> None:
    """Where the `compile` extra is installed, JAX looks for cuDNN unless it is told not to."""
    found = re.search(r"To run: `([^`]*)`", README.read_text())
    assert found is not None
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **compiled_in}
    command = found[1].replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_readmes_first_command_installs_what_its_plan_needs() -> None:
    (extras,) = re.findall(r"\[([\w,]*)\]' && .venv/bin/python -m examples", README.read_text())
    assert "compile" in extras.split(",")
    assert "`.venv/bin/python -m zerojax plan" in README.read_text()


def test_commands_that_install_an_extra_work_from_a_clone() -> None:
    """No index has zerojax."""
    kinds = ("*.py", "*.md", "*.toml")
    files = [file for name in FOLDERS for kind in kinds for file in (ROOT / name).rglob(kind)]
    outside = re.compile(r"pip install [^\n]*zerojax\\?\[")
    found = [f for f in files if "records" not in f.parts and outside.search(f.read_text())]
    assert [str(file.relative_to(ROOT)) for file in found if file != Path(__file__)] == []


@every_page
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@every_page
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if "://" not in link]
    assert [path for path in local if path and not (page.parent / path).exists()] == []


@every_page
def test_every_link_to_a_heading_of_the_docs_leads_to_it(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]*)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
            if anchor not in [re.sub(r"[-\s]+", "-", heading) for heading in plain]:
                missing.append(link)
    assert missing == []


@pytest.mark.parametrize("page", [ROOT / "docs/index.md", ROOT / "docs/steps.md"])
@pytest.mark.parametrize(
    "target",
    ["#dropout-and-batchnorm", "#equinox", "#nnx", "generation.md", "checkpoints.md", "logging.md"],
)
def test_what_a_step_may_have_is_found_from_the_start(page: Path, target: str) -> None:
    """On the page of steps, above its first code."""
    assert f"{target})" in page.read_text().partition("<details")[0].replace("#in-the-program", "")


@pytest.mark.parametrize(
    "drawing", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name
)
def test_drawings_can_be_read_on_a_phone(drawing: Path) -> None:
    """A screen of 390 pixels gives them 358."""
    text = drawing.read_text()
    width = int(re.search(r'viewBox="0 0 (\d+) ', text)[1])
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', text)]
    assert min(sizes) * min(1, 358 / width) >= 9


def test_code_breaks_behind_signs_and_blocks_stay() -> None:
    with_breaks = runpy.run_path(str(ROOT / "docs/site/breaks.py"))["on_page_content"]
    assert (
        with_breaks('<a href="x.y_z.html_long">short</a>') == '<a href="x.y_z.html_long">short</a>'
    )
    assert with_breaks("<code>offload_optimizer</code>") == "<code>offload_<wbr>optimizer</code>"
    block = "<pre><code>offload_optimizer</code></pre>"
    assert with_breaks(block) == block
    assert "&lt;<wbr>" not in with_breaks("zero_optimization&lt;=&quot;a&quot;")


def test_formulas_of_docstrings_become_text() -> None:
    pytest.importorskip("griffe")
    readable = runpy.run_path(str(ROOT / "docs/site/roles.py"))["readable"]
    assert readable(".. math:: x \\cdot 2^{-1}\n") == "```text\nx · 2^(-1)\n```\n"
    texts = [readable(inspect.getdoc(getattr(zerojax, name)) or "") for name in zerojax.__all__]
    assert [text for text in texts if "\\" in text or "math:" in text] == []


def test_leaf_paths_in_records_are_code() -> None:
    """Outside code, the site reads ``['params']['bias']`` as a link to a name it does not have."""
    for page in (ROOT / "benchmarks/records").glob("*.md"):
        assert "][" not in re.sub(r"`[^`]*`", "", page.read_text()), page.name


def app_of(module: str) -> Any:
    """The typer application that ``python -m module`` runs."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    name = f"{module}.__main__" if spec.submodule_search_locations else module
    return typer.main.get_command(importlib.import_module(name).app)


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind ``python -m`` of every command that a page names."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:zerojax|examples|benchmarks)\b[^`\n]*)", text):
        # Shell syntax and comments end a command, as does a sentence about it.
        words = shlex.split(re.split(r" #|[;|&)>]| \.\.\.", line)[0])
        yield words


@every_page
def test_every_command_that_a_page_names_has_its_options(page: Path) -> None:
    for module, *words in commands(page):
        if module.startswith("benchmarks"):
            assert importlib.util.find_spec(module) is not None, module
            continue
        command = app_of(module)
        if module == "zerojax":
            command = command.get_command(None, words[0]) if words else None
            assert command is not None, f"python -m zerojax {words}"
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        if words[:1] == ["launch"]:  # what follows the script is the script's
            words = [*itertools.takewhile(lambda word: not word.endswith(".py"), words)]
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help"}, f"{' '.join(words)}: {given - known}"


def test_the_map_of_the_architecture_has_the_rooms_in_their_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [room.replace(".", "/") for room in ROOMS if room not in ("api", "__main__")]
    assert re.findall(r"^\| `zerojax/([\w/]+)/` \|", text, re.M) == rooms
    drawn = re.findall(r">([\w/]+)</text>", (ROOT / "docs/rooms.svg").read_text())
    assert set(rooms) <= set(drawn)


def menu() -> Any:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def entries(section: list[dict[str, Any]]) -> Iterator[str]:
    """The pages of a section and of the sections in it, which have at most eight entries each."""
    assert len(section) <= 8, section
    for entry in section:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else entries(target)


def test_every_page_is_in_the_sites_menu() -> None:
    assert [*itertools.chain(*menu())] == ["Start", "How-to", "Reference", "Explanation", "Project"]
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} <= set(entries(menu()))


def test_the_notebook_has_the_tutorials_cells() -> None:
    notebook = json.loads(runpy.run_path(str(ROOT / "docs/site/cells.py"))["notebook"](TUTORIAL))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert code == [b.text.rstrip("\n") for b in blocks(TUTORIAL) if b.info == "python"]
    written = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    assert 'href="tutorial.ipynb"' in TUTORIAL.read_text()
    assert "](" not in written  # a notebook stands without the other pages
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_the_page_of_commands_has_every_command_and_option() -> None:
    pytest.importorskip("mkdocs")
    text = runpy.run_path(str(ROOT / "docs/site/commands.py"))["page"]()
    assert re.findall(r"^## (\w+)$", text, re.M) == [*COMMANDS]
    assert "| `--nproc-per-node " in text
    assert "`--attention auto\\|mosaic_gpu\\|cudnn\\|plain`" in text
    assert "| `largest_layer_assumed` | " in text
    for line in text.splitlines():
        if line.startswith("| "):  # a row of two cells
            assert len(re.split(r"(?<!\\)\|", line)) == 4, line


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.name)
def test_every_config_makes_a_zero(path: Path) -> None:
    zero = zerojax.zero(path)
    assert str(zero.config.stage) in path.name
    assert zero.config.bf16 == any(w in path.name for w in ("bf16", "offload", "nvme"))
    assert zero.config.fp16 == ("fp16" in path.name)
    assert zero.optimizer() is not None
