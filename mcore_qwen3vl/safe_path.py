"""No Python file is imported because it lies in the folder that a command is started in.

``python -m`` and ``python -c`` put that folder first among the places of modules. There may lie
what somebody downloaded, a ``numpy.py`` among it. Python leaves the folder out if it is started
with ``-P``, or with the environment variable :data:`VARIABLE`, which its child processes inherit.
``PYTHONPATH`` counts as ever.

This module imports only what every Python has loaded at its start: another import might find a file
in the folder that is to be left out.
"""

import os
import sys

VARIABLE = "PYTHONSAFEPATH"


def protect_children() -> None:
    """Start no process, from here on, that imports what lies in the current folder.

    Multiprocessing and PyTorch start helpers with ``python -c``, and torchrun its ranks with
    ``python -m``.
    """
    os.environ[VARIABLE] = "1"


def leave_out_current_folder() -> None:
    """Take out of the places of modules what ``python -m`` put there, here and in children.

    A clone that is not installed is found in the current folder alone. It stays, since its code
    runs already, and children find it by ``PYTHONPATH``.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[0] == home:
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([home, *paths])))
    elif not sys.flags.safe_path:
        del sys.path[0]
    protect_children()
