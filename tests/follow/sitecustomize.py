"""Commands that a test starts note what they run too, for `tests/tests_of.py`."""

import importlib.util
from pathlib import Path

# By its path: a command's sys.path need not have the folder in which `tests` is.
spec = importlib.util.spec_from_file_location("tests_of", Path(__file__).parents[1] / "tests_of.py")
if spec is not None and spec.loader is not None:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.record_in_this_process()
