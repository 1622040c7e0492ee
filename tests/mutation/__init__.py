"""Mutation testing: how many small faults, put into a module one at a time, its tests catch.

::

    python -m tests.mutation flexmask/intervals/rows.py --tests tests/lowering tests/intervals

Tests are collected once. Each mutant runs in a fork of that process, in which the code of the functions that it changes is
replaced, so that it costs the time of its tests and nothing else. Only tests that execute the changed statement run, those first
that caught most so far. Survivors are written to a JSON file; ``--again FILE`` runs only these.

What runs at import only (defaults of parameters, decorators, bodies of classes) is not mutated, nor are messages and types.
"""
