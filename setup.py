"""pyproject.toml says everything; this only removes what an earlier build left behind."""

import shutil

from setuptools import setup

shutil.rmtree("build/lib", ignore_errors=True)  # modules deleted since would be in the wheel too
setup()
