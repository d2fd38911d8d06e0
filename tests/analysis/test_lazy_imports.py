"""Importing the packages costs neither torch nor plotly."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["merganser.analysis", "merganser.tuning"])
def test_import_is_light(package):
    program = (
        f"import sys, {package}; assert not {{'torch', 'plotly', 'scipy'}} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
