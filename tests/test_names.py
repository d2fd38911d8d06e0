"""One concept, one class, one name."""

import ast
from collections import defaultdict

from support.source_trees import SOURCE, nodes


def test_no_class_name_stands_in_two_modules() -> None:
    homes = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
