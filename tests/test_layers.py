"""Imports flow downward, and what is tied to torch's distributed or private parts stays where it belongs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "epl"
LAYERS = (  # bottom first: a module imports from its own layer or from one listed before it
    *("errors", "lines", "units", "keys", "config", "cluster", "env", "scopes", "batch", "loss", "nn"),
    *("ir", "capture", "sharding", "cost", "schedule", "planner", "stage", "passes", "program"),
    *("runtime", "api", "processes", "board", "launcher", "cli", "report"),
)
FACADE = ("__init__", "__main__")  # these may import everything
DISTRIBUTED = ("runtime", "processes", "board", "launcher")  # the layers that may use torch.distributed
PRIVATE = ("capture",)  # the layers that may use private parts of torch
NUM_PRIVATE_USES = 4  # the memory model needs fake tensors and a dispatch mode; lower it whenever a use goes


class Use(NamedTuple):
    """A dotted name that a module imports, or reaches from what it imported."""

    path: str
    layer: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} uses {self.name}"


def _modules() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, path.relative_to(PACKAGE).with_suffix("").parts[0], ast.parse(path.read_text())


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the full name and the local name of everything imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # "import a.b" binds a; "import a.b as c" binds c to a.b
                yield node.lineno, alias.name, alias.asname or ""
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{start}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def _attributes(tree: ast.AST, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield dotted names such as torch.fx.Graph where the first part is an imported name."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        line, parts = node.lineno, []
        target: ast.expr = node
        while isinstance(target, ast.Attribute):
            parts.append(target.attr)
            target = target.value
        if isinstance(target, ast.Name) and target.id in bound:
            yield line, ".".join([bound[target.id], *reversed(parts)])


def _uses(*, attributes: bool) -> Iterator[Use]:
    for path, layer, tree in _modules():
        where = str(path.relative_to(PACKAGE.parent))
        bound = {}
        for line, name, local in _imports(tree):
            bound[local or name.split(".")[0]] = name if local else name.split(".")[0]
            yield Use(where, layer, line, name)
        if attributes:
            yield from (Use(where, layer, line, name) for line, name in _attributes(tree, bound))


def test_every_module_has_a_layer():
    unknown = sorted({layer for _, layer, _ in _modules()} - {*LAYERS, *FACADE})
    assert not unknown, f"say in LAYERS where these belong: {unknown}"


def test_imports_flow_downward():
    upward = []
    for use in _uses(attributes=False):
        package, *rest = use.name.split(".")
        assert package, f"{use.path}:{use.line} uses a relative import: the layer it comes from should be seen"
        if package != PACKAGE.name or use.layer in FACADE:
            continue
        # What only the facade has, such as "from epl import Config", would be everything at once.
        if not rest or rest[0] not in LAYERS or LAYERS.index(rest[0]) > LAYERS.index(use.layer):
            upward.append(str(use))
    assert not upward, "\n".join(["imports must flow downward:", *upward])


def test_imports_stand_at_the_top_unless_they_say_why():
    """An import inside a function hides a cycle; where it saves start-up time, a comment "# lazy: ..." says so."""
    hidden = []
    for path, _, tree in _modules():
        lines = path.read_text().splitlines()
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for line in sorted({line for function in functions for line, _, _ in _imports(function)}):
            if not any("# lazy:" in text for text in lines[max(0, line - 2) : line]):
                hidden.append(f"{path.relative_to(PACKAGE.parent)}:{line}")
    assert not hidden, "\n".join(["imports inside functions:", *hidden])


def test_only_the_runtime_and_the_launcher_know_torch_distributed():
    """Everything else can then be tested, and a plan made, without a process group."""
    wrong = [
        str(use)
        for use in _uses(attributes=True)
        if f"{use.name}.".startswith("torch.distributed.") and use.layer not in DISTRIBUTED
    ]
    assert not wrong, "\n".join(["torch.distributed outside of the runtime and the launcher:", *wrong])


def _is_private(name: str) -> bool:
    package, *rest = name.split(".")
    return package == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def test_private_torch_stays_in_capture_and_becomes_less():
    uses = [use for use in _uses(attributes=True) if _is_private(use.name)]
    outside = [str(use) for use in uses if use.layer not in PRIVATE]
    assert not outside, "\n".join(["private parts of torch outside of capture/:", *outside])
    listed = "\n".join(map(str, uses))
    assert len(uses) <= NUM_PRIVATE_USES, f"{len(uses)} uses, {NUM_PRIVATE_USES} are allowed:\n{listed}"
    assert len(uses) == NUM_PRIVATE_USES, f"lower NUM_PRIVATE_USES to {len(uses)}, so that it stays there"
