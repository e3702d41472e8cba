"""Who may import whom, and that every module has its tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("zerojax", "pallas_kernels", "examples", "benchmarks", "tests")

# The one place of each package for what jax does not export.
PRIVATE = {"zerojax/compat.py", "pallas_kernels/compat.py"}

# Tested elsewhere than in the test file of the same name.
TESTED_BY = {
    "zerojax/api.py": "test_equality.py",
    "zerojax/step.py": "test_equality.py",
    "zerojax/body.py": "test_bad_input.py",
    "zerojax/collect.py": "test_streamed.py",
    "zerojax/entering.py": "test_evaluate.py",
    "zerojax/evaluate_batch.py": "test_evaluate.py",
    "zerojax/evaluate_objects.py": "test_evaluate.py",
    "zerojax/evaluate_program.py": "test_evaluate.py",
    "zerojax/evaluate_state.py": "test_evaluate.py",
    "zerojax/inline.py": "offload/test_separate.py",
    "zerojax/row_kinds.py": "test_evaluate.py",
    "zerojax/row_rules.py": "test_evaluate.py",
    "zerojax/rows.py": "test_evaluate.py",
    "zerojax/linen.py": "test_equality.py",
    "zerojax/nnx.py": "test_nnx_objects.py",
    "zerojax/batch.py": "test_bad_input.py",
    "zerojax/call.py": "test_arguments.py",
    "zerojax/jitted.py": "test_arguments.py",
    "zerojax/extras.py": "test_sharding.py",
    "zerojax/state.py": "test_sharding.py",
    "zerojax/found.py": "test_mixed_precision.py",
    "zerojax/marks.py": "test_mixed_precision.py",
    "zerojax/parts.py": "test_sharding.py",
    "zerojax/plan.py": "test_sharding.py",
    "zerojax/planning.py": "test_sharding.py",
    "zerojax/report.py": "test_sharding.py",
    "zerojax/telemetry.py": "test_sharding.py",
    "zerojax/optim/wrap.py": "test_sharding.py",
    "zerojax/mesh.py": "test_bad_input.py",
    "zerojax/compat.py": "collectives/test_insert.py",
    "zerojax/compiler.py": "examples/test_kernels.py",
    "zerojax/collectives/order.py": "collectives/test_insert.py",
    "zerojax/collectives/shard.py": "collectives/test_insert.py",
    "zerojax/optim/scaling.py": "optim/test_named.py",
    "zerojax/cli/estimate.py": "cli/test_estimate_command.py",
    "zerojax/cli/export.py": "cli/test_export_command.py",
    "zerojax/cli/report.py": "cli/test_report_command.py",
    "zerojax/cli/bar.py": "cli/test_inspect.py",
    "zerojax/cli/compiling.py": "cli/test_plan.py",
    "zerojax/cli/fit.py": "cli/test_fit_command.py",
    "zerojax/lowered.py": "test_streamed.py",
    "zerojax/cli/planned.py": "cli/test_plan_table.py",
    "zerojax/cli/problem.py": "cli/test_plan.py",
    "pallas_kernels/arguments.py": "benchmarks/test_kernel_costs.py",
    "pallas_kernels/checks.py": "kernels/test_norms.py",
    "pallas_kernels/dropout.py": "kernels/test_norms.py",
    "pallas_kernels/elementwise.py": "kernels/test_fused_adamw.py",
    "pallas_kernels/measured.py": "kernels/test_dispatch.py",
    "pallas_kernels/varying.py": "kernels/test_norms.py",
}
# Folders whose tests are not a file a module.
TESTED_TOGETHER = {
    "zerojax/accumulation": "accumulation",
    "zerojax/checkpoint": "checkpoint",
    "zerojax/config": "config",
    "zerojax/foresight": "foresight",
    "zerojax/offload": "offload",
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Absolute names of the modules (or members of modules) that a file imports.

    Those within functions and under TYPE_CHECKING too, unless ``lazy`` is False.
    """
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    ("package", "barred"),
    [
        ("pallas_kernels", ("zerojax", "examples", "benchmarks", "tests")),
        ("zerojax", ("examples", "benchmarks", "tests")),
        ("examples", ("tests",)),
        ("benchmarks", ("tests",)),
    ],
)
def test_imports_run_one_way(package: str, barred: tuple[str, ...]) -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules(package)
        for name in imports(path)
        if within(name, *barred)
    ]
    assert not wrong


def test_the_config_stands_alone() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules("zerojax/config")
        for name in imports(path)
        if within(name, *PACKAGES) and not within(name, "zerojax.config")
    ]
    assert not wrong


def test_the_collectives_know_nothing_of_states() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in modules("zerojax/collectives")
        for name in imports(path)
        if within(name, "zerojax")
        and not within(name, "zerojax.collectives", "zerojax.compat", "zerojax.marks")
    ]
    assert not wrong


def test_no_cycles() -> None:
    ours = {name_of(path): path for path in modules("zerojax") if path.name != "__init__.py"}
    facades = {name_of(p): p for p in modules("zerojax") if p.name == "__init__.py"}

    def targets(path: Path) -> set[str]:
        """The modules of ours that a file imports, seen through the ``__init__`` files."""
        found: set[str] = set()
        for name in imports(path):
            if name in ours:
                found.add(name)
            elif name.rpartition(".")[0] in ours:
                found.add(name.rpartition(".")[0])
            elif (facade := name if name in facades else name.rpartition(".")[0]) in facades:
                member = name.rpartition(".")[2]
                found |= {
                    source
                    for export in imports(facades[facade])
                    if (source := export.rpartition(".")[0]) in ours
                    and (name == facade or export.rpartition(".")[2] == member)
                }
        return found

    graph = {name: targets(path) for name, path in ours.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("package", PACKAGES[:-1])
def test_what_jax_does_not_export_is_imported_in_one_place(package: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in modules(package)
        for name in imports(path)
        if within(name, "jax._src", "jaxlib", "flax.nnx.graphlib", "optax._src")
    }
    assert users <= PRIVATE


def test_importing_zerojax_starts_no_device() -> None:
    """Nothing at the top of a module may ask for devices: the program chooses them first."""
    calls = {"devices", "local_devices", "device_count", "make_mesh", "device_put"}
    for path in modules("zerojax"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            called = {n.func.attr for n in ast.walk(node)
                      if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}  # fmt: skip
            assert not called & calls, path


@pytest.mark.parametrize("package", ["zerojax", "pallas_kernels"])
def test_every_module_is_tested(package: str) -> None:
    tests = ROOT / "tests"
    missing = []
    for path in modules(package):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        where = path.relative_to(ROOT)
        inside = path.relative_to(ROOT / package)
        mirror = tests / inside.parent / f"test_{path.name}"
        if package == "pallas_kernels":  # a folder a kernel, a test file a folder
            mirror = tests / "kernels" / f"test_{Path(inside.parts[0]).stem}.py"
        together = TESTED_TOGETHER.get(str(where.parent))
        if mirror.exists() or (together and any((tests / together).glob("test_*.py"))):
            continue
        if not (tests / TESTED_BY.get(str(where), "none")).exists():
            missing.append(str(where))
    assert not missing, "write a test file of the same name, or say in TESTED_BY where it is tested"


def test_nothing_is_said_of_files_that_are_gone() -> None:
    for module, test in TESTED_BY.items():
        assert (ROOT / module).exists(), module
        assert (ROOT / "tests" / test).exists(), test


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their bare names, and stops at the second."""
    names = [path.name for path in modules("tests") if path.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} <= {"conftest.py"}
