"""A search for what is wrong in silence: whole runs are drawn at random and judged by oracles.

:mod:`.case` says what a run is, :mod:`.axes` draws one, :mod:`.running` runs it on forked ranks,
:mod:`.oracles` judge it, :mod:`.shrinking` makes it smaller, and :mod:`.search` is the loop.
"""
