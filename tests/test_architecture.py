"""The shape of the package: who may import whom, what only one module does, what stays out of the pure core, and words on everything public."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import frl

PACKAGE = Path(frl.__file__).parent
ROOT = PACKAGE.parent

# From what everything uses to what uses everything. A module imports from its own line or from an earlier one.
LAYERS = (
    ("types", "registry", "validate"),
    ("tree", "packing"),
    ("numerics", "one_operation", "philox", "suffix_sums", "rng", "native", "loop_operation", "compile", "parts", "scan"),
    ("networks", "distributions", "observations"),
    ("envs", "policies", "policy_registry", "heads", "critic_policies", "normalizers"),
    ("losses", "returns", "advantages", "gradients", "rollout", "optim"),
    ("algorithms", "members"),
    ("atomic", "train", "warm_up", "phases", "callbacks", "evaluate", "checkpoint", "history", "logs", "plots", "episode", "render", "export"),
    ("run_values", "run_schema", "run_file", "run_problems", "run_conflicts", "overrides", "config"),
    ("build", "run_directory", "provenance", "records"),
    ("saving", "fingerprint", "resume", "runtime", "load"),
    ("interrupts", "profiling", "population_run", "run"),
    ("commands",),
    ("cli",),
    ("__init__", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
CORE = RANK["algorithms"]
# Doors to the outside, by name.
IMPURE = ("envs/host.py", "envs/host_values.py", "envs/gymnasium_env.py", "envs/mujoco/")
HEAVY = ("rich", "matplotlib", "tensorboard", "wandb", "pydantic", "ruamel", "safetensors")

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def room(name: str) -> str:
    """``envs`` for ``envs.vector``."""
    return name.split(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_module(name: str) -> bool:
    place = PACKAGE.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def named(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """``(module, name or None)`` that one import statement names, in absolute form."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import"
        yield from ((node.module or "", alias.name) for alias in node.names)


def inside(node: ast.AST) -> Iterator[str]:
    """Modules of the package, without its name, that one import statement needs; ``""`` for a name of the package itself."""
    for module, name in named(node):
        if module == "frl" or module.startswith("frl."):
            inner = module.removeprefix("frl").removeprefix(".")
            deeper = f"{inner}.{name}".lstrip(".") if name else inner
            yield deeper if name and is_module(deeper) else inner


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when the module is imported, those for type checkers left out."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def in_core(path: Path) -> bool:
    place = path.relative_to(PACKAGE).as_posix()
    return RANK.get(room(module_name(path)), 0) <= CORE and not place.startswith(IMPURE)


# ---- who imports whom ----


def test_there_are_files():
    assert len(FILES) > 30


@every_file
def test_every_room_has_its_place(path: Path):
    assert room(module_name(path)) in RANK, f"name {module_name(path)} in LAYERS"


@every_file
def test_imports_go_down(path: Path):
    here = module_name(path)
    wrong = [name for node in ast.walk(parsed(path)) for name in inside(node) if name == "" or RANK[room(name)] > RANK[room(here)]]
    assert wrong == [], f"{here} imports {wrong}"


def test_imports_go_round_in_no_circle():
    graph = {module_name(path): {name for node in at_import(parsed(path)) for name in inside(node)} for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " > ".join((*above, name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                # A package's own modules do not import the package again.
                if other != name:
                    visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@every_file
def test_tests_and_benchmarks_are_not_imported(path: Path):
    modules = {module.split(".")[0] for node in ast.walk(parsed(path)) for module, _ in named(node)}
    assert not modules & {"tests", "benchmarks", "pytest", "hypothesis"}


def test_benchmarks_use_the_library_and_not_its_tests():
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        assert not {module.split(".")[0] for node in ast.walk(parsed(path)) for module, _ in named(node)} & {"tests"}


# ---- what one module does for all ----


def uses(path: Path) -> Iterator[str]:
    """Dotted names in the code of a file (not in its text): imports, and attributes of names."""
    for node in ast.walk(parsed(path)):
        for module, name in named(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            yield f"{module}.{name}" if name else module
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


@pytest.mark.parametrize(
    ("prefixes", "owner"),
    [
        (("torch.compile", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._higher_order_ops", "torch._C", "torch._subclasses"), "compile.py"),
        (("optree",), "tree.py"),
        (("torch.utils._pytree",), "tree.py"),
        (("pydantic",), ("run_schema.py", "run_values.py")),
        (("ruamel",), "run_file.py"),
        (("safetensors",), "checkpoint.py"),
        (("tensorboard", "torch.utils.tensorboard", "wandb"), "logs.py"),
        (("matplotlib",), "plots.py"),
        (("PIL",), "render.py"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_one_module_alone_knows(prefixes: tuple[str, ...], owner: str | tuple[str, ...]):
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for name in uses(path)
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
    }
    owners = {owner} if isinstance(owner, str) else {*owner}
    second = {"plots.py": ("render.py",), "compile.py": ("native/program.py", "native/library.py", "native/loop.py", "one_operation.py")}
    allowed = owners | {other for first in owners for other in second.get(first, ())}
    assert users <= allowed


def test_import_is_light():
    code = """
        import json, sys
        def loaded():
            return sorted({name.split(".")[0] for name in sys.modules} & set(sys.argv[1:]))
        import frl
        first = loaded()
        for name in ("make_apg", "build_learning_env", "build_policy", "running_normalizer", "adam", "build_algo", "make_evaluator", "LoopConfig"):
            getattr(frl, name)
        import frl.scan, frl.train, frl.checkpoint, frl.logs, frl.cli
        print(json.dumps([first, loaded()]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *HEAVY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


# ---- the pure core ----

# Numpy arrays become Python lists where bounds and nodes are read once, in the factory.
AT_BUILD_TIME = {"distributions.py": {"tolist"}}
# The seconds that a compilation took are the seam's to count, and where torch's library lies is its to know.
SEAM = "compile.py"
SEAMS = (SEAM, "native/library.py")
GLOBAL_GENERATORS = r"(np\.)?random\.|torch\.(rand(n|int|perm)?(_like)?|normal|bernoulli|multinomial|manual_seed|seed)$"
# Sums of gradients in buffers that the loop made itself, and memory that a native loop makes for its results.
OWN_BUFFERS = {"scan.py": {"_foreach_add_"}, "native/loop.py": {"set_", "zero_"}}


@every_file
def test_the_core_is_pure(path: Path):
    if not in_core(path):
        pytest.skip("not in the core")
    place = path.relative_to(PACKAGE).as_posix()
    methods = {"item", "tolist", "cpu", "numpy", "write_text", "write_bytes", "read_text", "read_bytes", "mkdir", "unlink"} - AT_BUILD_TIME.get(place, set())
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "open", "input", "breakpoint", "eval", "exec") or (isinstance(node.func, ast.Attribute) and node.func.attr in methods):
                found.append(f"line {node.lineno}: {called}()")
            if called.startswith("time.") and place not in SEAMS:
                found.append(f"line {node.lineno}: {called}()")
            if re.match(GLOBAL_GENERATORS, called):
                found.append(f"line {node.lineno}: {called}()")
        modules = {module for module, _ in named(node)} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
        allowed = {"time", "pathlib"} if place in SEAMS else set()
        banned = modules & ({"logging", "random", "datetime", "pathlib", "subprocess", "tempfile", "os", "rich", "time"} - allowed)
        found += [f"line {getattr(node, 'lineno', 0)}: import {name}" for name in sorted(banned)]
    assert found == []


@every_file
def test_the_core_changes_nothing_in_place(path: Path):
    place = path.relative_to(PACKAGE).as_posix()
    if not in_core(path) or place in SEAMS:  # it marks tensors of its own as needing a gradient
        pytest.skip("not in the core, or the seam")
    own, found = {"requires_grad_", *OWN_BUFFERS.get(place, ())}, []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.endswith("__") and name not in own:
                found.append(f"line {node.lineno}: .{name}()")
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.Call) and any(word.arg == "out" for word in node.keywords) and ast.unparse(node.func).startswith("torch."):
            found.append(f"line {node.lineno}: out=")
    assert found == []


# ---- words ----


@every_file
def test_every_module_says_what_it_is_for(path: Path):
    if path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip():
        pytest.skip("an empty package file")
    text = ast.get_docstring(parsed(path))
    assert text
    first = text.splitlines()[0]
    assert first.endswith((".", ":", "?", "``"))
    assert len(first) <= 160


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


@every_file
def test_everything_public_has_a_docstring(path: Path):
    assert [node.name for node in public(parsed(path)) if not (ast.get_docstring(node) or "").strip()] == []


@every_file
def test_everything_public_says_its_types(path: Path):
    bare = []
    for node in public(parsed(path)):
        if isinstance(node, ast.ClassDef):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
        bare += [f"{node.name}({argument.arg})" for argument in arguments if argument.annotation is None]
        bare += [f"{node.name} ->"] if node.returns is None else []
    assert bare == []


@every_file
def test_arguments_of_a_docstring_exist(path: Path):
    """The names under ``Args:`` are those of the signature."""
    unknown = []
    for node in public(parsed(path)):
        text = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef) or "\nArgs:\n" not in text:
            continue
        arguments = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg)))}
        for line in text.split("\nArgs:\n")[1].splitlines():
            if not line.startswith("    "):
                break
            if line.startswith("     ") or ":" not in line:
                continue
            names = [name.strip(" *`") for name in line.split(":")[0].split(",")]
            unknown += [f"{node.name}: {name}" for name in names if name.isidentifier() and name not in arguments]
    assert unknown == []


def test_no_room_is_called_after_nothing():
    assert [path.name for path in FILES if path.stem in ("utils", "util", "misc", "helpers", "helper", "common", "tools")] == []


def test_exported_names_resolve():
    assert len(frl.__all__) == len(set(frl.__all__))
    assert sorted(dir(frl)) == sorted(frl.__all__)
    for name in frl.__all__:
        value = getattr(frl, name)
        home = getattr(value, "__module__", "frl")
        if callable(value) and isinstance(home, str):
            assert home.startswith("frl"), name
    # A module of the same name would take the place of the exported one as soon as anything imports it.
    rooms = {path.stem if path.name != "__init__.py" else path.parent.name for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert set(frl._HOME) & rooms == set()
    for name in ("compile", "envs", "numerics", "optim", "returns", "rng", "scan", "train", "tree"):
        assert getattr(frl, name) is importlib.import_module(f"frl.{name}")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = frl.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


def test_exports_of_optim_resolve():
    from frl import optim

    assert all(hasattr(optim, name) for name in optim.__all__)


def text_files() -> list[Path]:
    folders = [ROOT / name for name in ("frl", "tests", "benchmarks", "configs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in (".py", ".yaml", ".yml", ".md", ".toml", ".sh", "")]
    return sorted(
        [path for path in files if "__pycache__" not in path.parts] + [path for path in (ROOT / "README.md", ROOT / "pyproject.toml") if path.is_file()]
    )


def test_no_path_of_one_machine():
    words = ["/" + name + "/" for name in ("work", "home", "root", "Users", "tmp")]
    found = [f"{path.relative_to(ROOT)}: {word}" for path in text_files() for word in words if word in path.read_text(encoding="utf-8")]
    assert found == []
