import ctypes
import platform

import pytest

from merganser.engine import allocator


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_glibc_accepts_the_settings(monkeypatch):
    answers = []
    mallopt = ctypes.CDLL(None).mallopt

    class Library:
        def mallopt(self, option, value):
            answers.append(mallopt(option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    allocator.keep_freed_memory()
    assert answers == [1, 1, 1]


def test_other_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    allocator.keep_freed_memory()
