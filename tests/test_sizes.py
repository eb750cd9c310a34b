"""A file fits one sitting and a function one screen. Where one cannot, ``EXEMPT`` says why."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("epl", "examples", "benchmarks", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50  # without the docstring: an explained interface should not cost anything
MAX_PARAMETERS = 6  # without self and cls
MAX_NESTING = 3  # of if, for, while, with, try and match

EXEMPT: dict[str, str] = {
    "benchmarks/measure.py:train": "what a contestant says of itself, by name, in one call",
    "epl/nn/moe.py:__init__": "a layer's settings are keyword arguments, as torch's own layers have them",
}  # "epl/file.py" or "epl/file.py:function" -> the reason

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_OWN_BODY = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)  # counted by themselves


def _sources() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def _functions() -> Iterator[tuple[str, Function]]:
    for path, source in _sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                yield f"{path}:{node.name}", node


def _num_lines(function: Function) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def _num_parameters(function: Function) -> int:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def _nesting(node: ast.AST, depth: int = 0) -> int:
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN_BODY):
            continue
        # An "elif" is an If that stands alone in the "else" of another; it reads as one level.
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, _nesting(child, depth + (isinstance(child, _BLOCKS) and not is_elif)))
    return deepest


def _violations() -> Iterator[tuple[str, str]]:
    for path, source in _sources():
        num_lines = len(source.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield path, f"{num_lines} lines, {MAX_FILE_LINES} are allowed"
    limits: list[tuple[Callable[[Function], int], int, str]] = [
        (_num_lines, MAX_FUNCTION_LINES, "lines"),
        (_num_parameters, MAX_PARAMETERS, "parameters"),
        (_nesting, MAX_NESTING, "levels of nesting"),
    ]
    for name, function in _functions():
        for measure, limit, what in limits:
            if measure(function) > limit:
                yield name, f"{measure(function)} {what}, {limit} are allowed"


def test_files_and_functions_keep_their_limits():
    wrong = [f"{name}: {why}" for name, why in _violations() if name not in EXEMPT]
    assert not wrong, "\n".join(["look for a seam:", *wrong])


def test_exemptions_are_still_needed():
    assert not EXEMPT.keys() - {name for name, _ in _violations()}, "these keep the limits by now"


def test_the_measures_measure():
    source = '''
def f(self, a, b, /, c, *rest, d, **more):
    """Says
    much."""
    if a:
        for b in c:
            pass
    elif b:
        with c:
            x = lambda: [i for i in a if i]

    def inner():
        while True:
            while True:
                while True:
                    pass
'''
    function, *_ = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    assert (_num_lines(function), _num_parameters(function), _nesting(function)) == (13, 4, 2)
