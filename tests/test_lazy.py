"""Modules that are imported on first use."""

import sys
import threading

import pytest

from merganser.lazy import LazyModule, defer, is_imported, once_imported


class Placeholder:
    pass


@pytest.fixture
def heavy(tmp_path, monkeypatch):
    """A lazy module that has not been imported, with a function and a number."""
    name = "heavy_to_import"
    (tmp_path / f"{name}.py").write_text("threads = 8\ndef double(value, by=2):\n    return value * by\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield LazyModule(name)
    sys.modules.pop(name, None)


def test_a_module_is_imported_when_it_is_used(heavy):
    assert not is_imported("heavy_to_import")
    assert heavy.threads == 8
    assert is_imported("heavy_to_import")
    with pytest.raises(AttributeError, match="heavy_to_import"):
        heavy.absent  # noqa: B018


def test_placeholders_do_not_import_it(heavy):
    calls = []
    defer("heavy_to_import", ["double"], Placeholder, lambda *args, **options: calls.append((args, options)))
    given = Placeholder()
    early = heavy.double
    early(given, by=3)
    assert calls == [(("double", given), {"by": 3})]
    assert not is_imported("heavy_to_import")
    assert early(4, by=3) == 12
    assert is_imported("heavy_to_import")
    assert heavy.double is sys.modules["heavy_to_import"].double


def test_an_action_runs_once_before_any_thread_uses_the_module(heavy):
    ran, seen, start = [], [], threading.Barrier(4)

    def use():
        start.wait()
        seen.append(heavy.threads)

    def act(module):
        ran.append(module)
        module.threads = 1

    with once_imported("heavy_to_import", act):
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ran) == 1
    assert seen == [1] * 4


def test_an_action_runs_at_once_if_the_module_is_there_and_never_after_the_block(heavy):
    ran = []
    with once_imported("heavy_to_import", ran.append):
        pass
    assert heavy.threads == 8
    assert ran == []
    with once_imported("heavy_to_import", ran.append):
        assert ran == [sys.modules["heavy_to_import"]]
