"""``python -m tensorbus`` is the ``tensorbus`` command."""

from ._command import main

main()
