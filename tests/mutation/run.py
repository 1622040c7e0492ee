"""Runs the tests of each mutant in a fork of a process that has collected them."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import pytest

from tests.mutation.mutants import Mutant, mutants

__all__ = ["Options", "Runner"]

#: Bytes that the tests of one mutant may take in addition to the process that they are forked from.
MEMORY = 4 * 2**30
#: How a fork ends that no signal ends.
SURVIVED, CAUGHT, NOT_APPLIED = 0, 10, 11


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        modules: files of the package.
        out: where the results are written, as JSON.
        jobs: forks at a time.
        sample: the share of the mutants that run.
        budget: seconds of tests for one mutant, the slowest tests left out first.
        again: results of which only the survivors run.
    """

    modules: Sequence[Path]
    out: Path
    jobs: int = 2
    sample: float = 1.0
    budget: float = 60.0
    again: Path | None = None


@dataclass
class Results:
    """Of one module; survivors with their line, the statement and the change."""

    mutants: int = 0
    caught: int = 0
    timed_out: int = 0
    not_applied: int = 0
    seconds: float = 0.0
    survived: list[dict[str, Any]] = field(default_factory=list)
    not_covered: list[dict[str, Any]] = field(default_factory=list)


class Module:
    """A module under test: its mutants, and how one is put in place."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.source = path.read_text(encoding="utf-8")
        self.lines = self.source.splitlines()
        self.mutants = mutants(self.source)
        self.module: ModuleType = next(
            module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(self.path)
        )
        self.functions: dict[tuple[str, int, int], list[FunctionType]] = defaultdict(list)
        places = {code: place for place, code in self._codes(ast.parse(self.source))}
        package = self.module.__name__.partition(".")[0] + "."
        self.caches = []
        for found in gc.get_objects():  # by type(), since isinstance() asks some objects of torch that warn
            if type(found) is FunctionType and found.__code__ in places and found.__code__.co_filename == str(self.path):
                self.functions[places[found.__code__]].append(found)
            elif type(found) is functools._lru_cache_wrapper and found.__module__.startswith(package):
                self.caches.append(found)

    def _codes(self, tree: ast.Module) -> Iterator[tuple[tuple[str, int, int], CodeType]]:
        """The code of each function, by its name, its line and how many such there are before it."""
        seen: Counter[tuple[str, int]] = Counter()

        def walk(code: CodeType) -> Iterator[tuple[tuple[str, int, int], CodeType]]:
            for constant in code.co_consts:
                if isinstance(constant, CodeType):
                    place = constant.co_qualname, constant.co_firstlineno
                    yield (*place, seen[place]), constant
                    seen[place] += 1
                    yield from walk(constant)

        yield from walk(compile(tree, str(self.path), "exec", dont_inherit=True))

    def put(self, mutant: Mutant) -> bool:
        """Whether the mutant could be put in place."""
        original = dict(self._codes(ast.parse(self.source)))
        tree = mutant.apply(ast.parse(self.source))
        changed = 0
        for place, code in self._codes(tree):
            if code != original.get(place):
                for function in self.functions.get(place, []):
                    function.__code__ = code
                    changed += 1
        if not changed:
            changed += self._put_constant(mutant, tree)
        for cached in self.caches:
            cached.cache_clear()
        return changed > 0

    def _put_constant(self, mutant: Mutant, tree: ast.Module) -> int:
        """A module's constant, also where other modules have imported it; returns how many have it."""
        changed = 0
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and statement.lineno == mutant.first:
                (name,) = (target.id for target in statement.targets if isinstance(target, ast.Name))
                value = eval(compile(ast.Expression(statement.value), str(self.path), "eval"), self.module.__dict__)
                old = self.module.__dict__[name]
                for module in list(sys.modules.values()):
                    if getattr(module, "__dict__", {}).get(name, module) is old:
                        module.__dict__[name] = value
                        changed += 1
        return changed

    def described(self, mutant: Mutant) -> dict[str, Any]:
        return {"line": mutant.first, "statement": self.lines[mutant.first - 1].strip(), "change": mutant.text}


class Runner:
    """A pytest plugin that runs mutants where pytest would run the tests."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.failed = False

    # ---------------------------------------------------------------- what pytest calls

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        self.trace({str(path.resolve()) for path in self.options.modules})
        modules = [Module(path) for path in self.options.modules]
        gc.collect()
        gc.freeze()
        results = {}
        for module in modules:
            name = str(module.path.relative_to(Path.cwd()))
            results[name] = self.run(module, name)
            found = results[name]
            ran = found.mutants - found.not_applied
            print(
                f"{name}: {found.caught + found.timed_out} of {ran} mutants caught ({found.timed_out} by the time), "
                f"{len(found.survived)} survived, {len(found.not_covered)} are in no test; {found.seconds:.0f} s",
                flush=True,
            )
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps({name: vars(one) for name, one in results.items()}, indent=1) + "\n")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    # ---------------------------------------------------------------- the tests without a mutant

    def trace(self, files: set[str]) -> None:
        """Which tests execute each line, and how long each takes; imports what they import, so that no mutant's tests have to."""
        self.tests: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.took: dict[int, float] = {}
        parts = [range(start, len(self.items), self.options.jobs) for start in range(self.options.jobs)]
        running = [_fork(functools.partial(self._traced, files, part)) for part in parts]
        for _, end in running:
            with os.fdopen(end, encoding="utf-8") as pipe:
                for name in json.loads(next(pipe, "[]")):
                    with contextlib.suppress(Exception):  # modules of other systems, and those that are made up
                        importlib.import_module(name)
                for line in pipe:
                    number, seconds, passed, executed = json.loads(line)
                    if not passed:
                        print(f"left out, since it fails without a mutant: {self.items[number].nodeid}", flush=True)
                        continue
                    self.took[number] = seconds
                    for place in executed:
                        self.tests[tuple(place)].append(number)
        for child, _ in running:
            os.waitpid(child, 0)
        print(f"{len(self.took)} tests, {sum(self.took.values()):.0f} s", flush=True)

    def _traced(self, files: set[str], part: Sequence[int], pipe: int) -> int:
        found, before = [], set(sys.modules)
        for at, number in enumerate(part):
            executed: set[tuple[str, int]] = set()

            def of_line(frame: Any, event: str, _: Any, executed: set[tuple[str, int]] = executed) -> Any:
                executed.add((frame.f_code.co_filename, frame.f_lineno))
                return of_line

            def of_call(frame: Any, event: str, _: Any, of_line: Any = of_line) -> Any:
                return of_line(frame, event, _) if frame.f_code.co_filename in files else None

            began = time.process_time()
            sys.settrace(of_call)
            passed = self._passes(number, part[at + 1] if at + 1 < len(part) else None)
            sys.settrace(None)
            found.append([number, time.process_time() - began, passed, sorted(executed)])
        imported = [name for name in sys.modules if name not in before and name.startswith(("torch.", "flexmask."))]
        with os.fdopen(pipe, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in [imported, *found])
        return SURVIVED

    def _passes(self, number: int, following: int | None) -> bool:
        self.failed = False
        item = self.items[number]
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None if following is None else self.items[following])
        return not self.failed

    # ---------------------------------------------------------------- the mutants

    def run(self, module: Module, name: str) -> Results:
        """All mutants of a module, some at a time."""
        results, began = Results(), time.monotonic()
        waiting = self._chosen(module, name)
        results.mutants = len(waiting)
        running: dict[int, tuple[Mutant, int, float]] = {}
        catches: Counter[int] = Counter()
        waiting.reverse()
        while waiting or running:
            while waiting and len(running) < self.options.jobs:
                mutant = waiting.pop()
                tests = self._covering(module, mutant, catches)
                if not tests:
                    results.not_covered.append(module.described(mutant))
                    continue
                seconds = sum(self.took[number] for number in tests)
                child, end = _fork(functools.partial(self._tested, module, mutant, tests, 10 + 3 * seconds))
                running[child] = mutant, end, time.monotonic() + 30 * (10 + 3 * seconds)
            self._reap(module, running, catches, results)
        results.seconds = round(time.monotonic() - began, 1)
        return results

    def _chosen(self, module: Module, name: str) -> list[Mutant]:
        if self.options.again is not None:
            old = json.loads(self.options.again.read_text()).get(name, {"survived": [], "not_covered": []})
            wanted = [(one["statement"], one["change"]) for one in old["survived"] + old["not_covered"]]
            return [one for one in module.mutants if (module.lines[one.first - 1].strip(), one.text) in wanted]
        draw = random.Random(0)
        return [mutant for mutant in module.mutants if draw.random() < self.options.sample]

    def _covering(self, module: Module, mutant: Mutant, catches: Counter[int]) -> list[int]:
        """The tests that execute the mutant's statement, those first that caught most, then the fastest."""
        found = {number for line in range(mutant.first, mutant.last + 1) for number in self.tests[str(module.path), line]}
        if module.lines[mutant.first - 1][:1].strip():  # a constant of the module
            found = set(self.took)
        ordered = sorted(found, key=lambda number: (-catches[number], self.took[number]))
        seconds, kept = 0.0, list[int]()
        for number in ordered:
            seconds += self.took[number]
            if seconds > self.options.budget and kept:
                break
            kept.append(number)
        return kept

    def _tested(self, module: Module, mutant: Mutant, tests: Sequence[int], limit: float, pipe: int) -> int:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + limit)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        try:
            if not module.put(mutant):
                return NOT_APPLIED
        except ValueError:  # another number of free variables
            return NOT_APPLIED
        for at, number in enumerate(tests):
            if not self._passes(number, tests[at + 1] if at + 1 < len(tests) else None):
                os.write(pipe, str(number).encode())
                return CAUGHT
        return SURVIVED

    def _reap(
        self, module: Module, running: dict[int, tuple[Mutant, int, float]], catches: Counter[int], results: Results
    ) -> None:
        """Waits for one fork to end, and counts it."""
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child in running:
                break
            for one, (_, _, end) in running.items():
                if time.monotonic() > end:
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.005)
        mutant, end, _ = running.pop(child)
        with os.fdopen(end, "rb") as pipe:
            caught_by = pipe.read()
        code = os.waitstatus_to_exitcode(status)
        if code == SURVIVED:
            results.survived.append(module.described(mutant))
        elif code == NOT_APPLIED:
            results.not_applied += 1
        elif code in (-signal.SIGXCPU, -signal.SIGKILL):
            results.timed_out += 1
        else:
            results.caught += 1
        if caught_by:
            catches[int(caught_by)] += 1


def _fork(work: Callable[[int], int]) -> tuple[int, int]:
    """A child process that does ``work`` with the end of a pipe, silently, and the pipe's other end."""
    end, pipe = os.pipe()
    child = os.fork()
    if child:
        os.close(pipe)
        return child, end
    _run_and_exit(work, end, pipe)


def _run_and_exit(work: Callable[[int], int], end: int, pipe: int) -> NoReturn:
    code = CAUGHT
    try:
        os.close(end)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        with contextlib.redirect_stdout(sys.__stdout__), contextlib.redirect_stderr(sys.__stderr__):
            code = work(pipe)
    finally:
        os._exit(code)
