"""Importing the packages costs neither torch nor plotly; names still resolve."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["merganser.analysis", "merganser.tuning"])
def test_import_is_light(package):
    program = (
        f"import sys, {package}; assert not {{'torch', 'plotly', 'scipy'}} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_listed_name_resolves():
    import merganser.analysis
    import merganser.tuning

    for package in (merganser.analysis, merganser.tuning):
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert name in dir(package)
        with pytest.raises(AttributeError, match="nothing"):
            package.nothing  # noqa: B018
