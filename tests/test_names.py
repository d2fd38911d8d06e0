"""One concept, one class, one name."""

import ast
from collections import defaultdict
from pathlib import Path

import merganser

SOURCE = Path(merganser.__file__).parent


def test_no_class_name_stands_in_two_modules() -> None:
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
