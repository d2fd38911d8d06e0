"""One concept, one class or alias of a type, one name."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.source_trees import SOURCE, nodes


def named_types(node: ast.AST) -> Iterator[str]:
    """Yield the public names of classes and aliases of types that a node of a syntax tree defines."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        yield ast.unparse(node.target)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
        of = node.value.value if isinstance(node.value, ast.Subscript) else node.value
        names = [ast.unparse(target) for target in node.targets]
        # The options of commands, `Task = Annotated[…]`, are named as users type them.
        yield from (name for name in names if re.match("[A-Z][a-z]", name) and ast.unparse(of) != "Annotated")


def test_no_class_or_alias_stands_in_two_modules() -> None:
    homes = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in (name for node in nodes(path) for name in named_types(node) if not name.startswith("_")):
            homes[name].add(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them as modules of their own, so that only one of two could run in a session."""
    counts = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
