"""Who may import whom."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import ROOMS

ROOT = Path(__file__).parent.parent
PACKAGES = ("zerojax", "pallas_kernels", "examples", "benchmarks", "tests")

# The places for what jax does not export, or exports without a promise of what is in it.
PRIVATE = {"zerojax/xla/compat.py", "zerojax/xla/jaxprs.py", "pallas_kernels/compat.py"}

# Documented members of NamedTuples, classes and `os`, whose names start with an underscore.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit"}

# Further attributes that JAX promises nothing of.
UNPROMISED = {"ctx", "get_bind_params", "compile_args", "source_info"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Absolute names of the modules (or members of modules) that a file imports.

    Those within functions and under TYPE_CHECKING too, unless ``lazy`` is False.
    """
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    tree = parsed(path)
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


def room_of(name: str) -> str | None:
    """The innermost room that a module, or a member of one, stands in; None for the face itself."""
    return max((room for room in ROOMS if within(name, f"zerojax.{room}")), key=len, default=None)


def test_every_module_stands_in_a_room() -> None:
    outside = [name for path in modules("zerojax") if not room_of(name := name_of(path))]
    assert outside == ["zerojax"]


def test_a_room_imports_only_from_those_below() -> None:
    wrong = []
    for path in modules("zerojax"):
        for target in imports(path):
            here, there = room_of(name_of(path)), room_of(target)
            above = there and ROOMS.index(there) > ROOMS.index(here) if here else False
            if here and within(target, "zerojax") and (there is None or above):
                wrong.append(f"{name_of(path)} imports {target}")
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


@functools.cache
def own_names() -> set[str]:
    """Names of attributes and functions that the packages give themselves."""
    files = [path for package in PACKAGES[:-1] for path in modules(package)]
    nodes = [node for path in files for node in ast.walk(parsed(path))]
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.attr for node in stored if isinstance(node, ast.Attribute)}
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    return names | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("package", PACKAGES[:-1])
def test_what_others_keep_to_themselves_is_read_in_one_place(package: str) -> None:
    """Attributes with an underscore in front are those of these packages."""
    wrong, own = [], DOCUMENTED | own_names()
    for path in modules(package):
        if str(path.relative_to(ROOT)) in PRIVATE:
            continue
        for node in ast.walk(parsed(path)):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            private = name.startswith("_") and not name.startswith("__") and name not in own
            if private or name in UNPROMISED:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} reads .{name}")
    assert not wrong


def test_parameters_of_equations_are_read_in_one_place() -> None:
    """By a name; what goes through all of them, whatever their names, may do so anywhere."""
    jaxpr_rooms = ("plan", "trace", "collectives", "accumulation", "offload", "evaluation", "step")
    wrong = []
    for path in modules("zerojax"):
        if room_of(name_of(path)) not in jaxpr_rooms:
            continue
        for node in ast.walk(parsed(path)):
            of = node.value if isinstance(node, ast.Subscript) else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value if node.func.attr in ("get", "pop") else None
            if isinstance(of, ast.Attribute) and of.attr == "params":
                named = node.slice if isinstance(node, ast.Subscript) else node.args[0]
                if isinstance(named, ast.Constant):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_importing_zerojax_starts_no_device() -> None:
    """Nothing at the top of a module may ask for devices: the program chooses them first."""
    calls = {"devices", "local_devices", "device_count", "make_mesh", "device_put"}
    for path in modules("zerojax"):
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            called = {n.func.attr for n in ast.walk(node)
                      if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}  # fmt: skip
            assert not called & calls, path
