"""Mutation testing of the protocol core: which small changes does no test detect?

    make mutants
    make mutants ARGS="--only protocol/peer_table.py"
    make mutants ARGS="--again"          # only survivors of the last run

The tests are collected once.  Each mutant is a forked process that replaces the code of one
function and runs the tests that reach the changed statement, the shortest first, until one fails.
For module-level code, everything is imported again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

sys.path.insert(0, str(Path(__file__).parent))
from operators import Mutant, mutants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightyear_node"
MODULES = (
    *sorted((PACKAGE / "protocol").glob("*.py")),
    PACKAGE / "node/gossip.py",
)
UNITS = (
    "protocol/test_*",
    "node/test_gossip*",
    "node/test_third*",
    "node/test_in*",
    "config/test_*",
)
TESTS = (
    *sorted(str(path) for name in UNITS for path in (ROOT / "tests/unit").glob(f"{name}.py")),
    *(
        str(ROOT / "tests/sim" / f"test_{name}.py")
        for name in ("golden", "schedules", "simulation")
    ),
)
TOO_LONG = "not storm and not hash_order"
RESULTS = ROOT / "build" / "mutants.json"
BASELINE = ROOT / "build" / "mutants-baseline.json"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
KILLED, SURVIVED, TIMEOUT, UNREACHED = "killed", "survived", "timeout", "unreached"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--again", action="store_true", help="only survivors of the last run")
    parser.add_argument("--equivalents", action="store_true", help="only the listed equivalents")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--budget", type=float, default=20.0, help="CPU seconds of tests per mutant"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    RESULTS.parent.mkdir(exist_ok=True)
    # Only failure counts: no shrinking, and the same examples for each mutant.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", phases=phases, derandomize=True, database=None, max_examples=30, deadline=None
    )
    hypothesis.settings.load_profile("mutants")
    run = Run(options)
    code = pytest.main([*QUIET, "-k", TOO_LONG, *TESTS], plugins=[run])
    survivors = report(run.chosen, run.results)
    expected = len(run.chosen) if options.equivalents else 0
    return code or int(survivors != expected)


QUIET = ("-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:rerunfailures")


class Run:
    """A pytest plugin that runs the collected tests once per mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.results: dict[str, list[str]] = _earlier() if options.again else {}
        self.chosen = self._choose()
        self._kills: defaultdict[tuple[Path, str], Counter[str]] = defaultdict(Counter)
        self._reached: dict[str, set[tuple[str, int]]] = {}
        self._took: dict[str, float] = {}

    def _choose(self) -> list[Mutant]:
        options = self._options
        every = [one for path in MODULES for one in mutants(path, _shown(path))]
        chosen = [one for one in every if options.only in one.name.split(" ")[0]]
        listed = _equivalents()
        chosen = [one for one in chosen if _is_listed(one, listed) == options.equivalents]
        if options.again:
            dead = {name for name, result in self.results.items() if not _lives(result)}
            chosen = [one for one in chosen if one.name not in dead]
            chosen.sort(key=lambda one: one.name in self.results)
        if options.sample:
            chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        return chosen

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        began = time.monotonic()
        for nodeid, (took, lines) in _baseline(items).items():
            self._took[nodeid] = took
            self._reached[nodeid] = {(path, line) for path, line in lines}
        print(f"{len(items)} tests take {sum(self._took.values()):.0f} s", flush=True)
        gc.collect()
        gc.freeze()  # so that children do not copy pages
        running: dict[int, tuple[Mutant, int]] = {}
        waiting = list(reversed(self.chosen))
        done = 0
        while waiting or running:
            while waiting and len(running) < self._options.jobs:
                mutant = waiting.pop()
                tests = [items[nodeid] for nodeid in self._order(mutant)]
                if not tests:
                    self.results[mutant.name] = [UNREACHED, ""]
                    continue
                pipe, pid = _fork(partial(_try, mutant, tests, self._took))
                running[pipe] = mutant, pid
            for pipe in select.select(list(running), [], [])[0]:
                mutant, pid = running.pop(pipe)
                self._note(mutant, *_ended(pipe, pid))
                done += 1
                if done % 50 == 0:
                    _save(self.results)
                    minutes = (time.monotonic() - began) / 60
                    print(f"{done} of {len(self.chosen)} in {minutes:.1f} min", flush=True)
        _save(self.results)
        return True

    def _note(self, mutant: Mutant, output: str, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if code > 1:
            raise SystemExit(f"this mutant could not be tried: {mutant.name}")
        result = {0: SURVIVED, 1: KILLED}.get(code, TIMEOUT)
        self.results[mutant.name] = [result, output]
        if result == SURVIVED:
            print(f"survived: {mutant.module.name}:{mutant.line} {mutant.name}", flush=True)
        elif output:
            self._kills[mutant.module, mutant.function][output] += 1

    def _order(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant: first those that killed its neighbours, then the shortest.

        Module-level code is reached by every test.
        """
        path = str(mutant.module)
        lines = {(path, line) for line in mutant.lines}
        reaching = self._reached.items()
        found = [one for one, reached in reaching if lines & reached or not mutant.function]
        kills = self._kills[mutant.module, mutant.function]
        found.sort(key=lambda one: (-min(kills[one], 3), self._took[one] / _worth(one)))
        left, chosen = self._options.budget, []
        for one in found:
            left -= self._took[one]
            if left > 0 or not chosen:
                chosen.append(one)
        return chosen


def _baseline(items: dict[str, pytest.Item]) -> dict[str, Any]:
    """Measure each new test, or all of them if the product changed."""
    product = sha256(b"".join(path.read_bytes() for path in MODULES)).hexdigest()
    known = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    tests = known["tests"] if known.get("product") == product else {}
    new = [item for nodeid, item in items.items() if nodeid not in tests]
    if new:
        tests |= {nodeid: rest for nodeid, *rest in _in_child(partial(_watched, new))}
        BASELINE.write_text(json.dumps({"product": product, "tests": tests}))
    return {nodeid: tests[nodeid] for nodeid in items}


# In the forked processes.


def _watched(items: Sequence[pytest.Item]) -> Iterator[Any]:
    """Measure the time of every test and the lines that it reaches."""
    ours = {str(path) for path in MODULES}
    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, argument: object) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return local(frame, event, argument) if frame.f_code.co_filename in ours else None

    for item, following in _pairs(items):
        lines.clear()
        threading.settrace(trace)
        sys.settrace(trace)
        began = time.process_time()
        reports = runtestprotocol(item, nextitem=following, log=False)
        took = time.process_time() - began
        sys.settrace(None)
        failed = [report for report in reports if report.failed]
        if failed:
            raise SystemExit(f"{item.nodeid} fails without any mutant:\n{failed[0].longrepr}")
        yield item.nodeid, took, sorted(lines)


def _try(mutant: Mutant, items: Sequence[pytest.Item], took: dict[str, float]) -> Iterator[str]:
    """Yield the test that failed, if any."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if not mutant.function:
        _limit(20.0 + sum(took[item.nodeid] for item in items) * 3)
        yield from _try_imported(mutant, [item.nodeid for item in items])
        return
    _swap(mutant)
    for item, following in _pairs(items):
        _limit(2.0 + 5.0 * took[item.nodeid])
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            yield item.nodeid
            return


def _limit(cpu_s: float) -> None:
    """End an endless mutant by a signal; generous, because the machine may be busy."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, 30.0 + 10.0 * cpu_s)


def _swap(mutant: Mutant) -> None:
    code = mutant.compiled()
    target: Any = importlib.import_module(_dotted(mutant.module))
    for name in mutant.function.split("."):
        code = next(
            one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name
        )
        target = vars(target)[name]
    target = getattr(target, "fget", None) or getattr(target, "__func__", target)
    target.__code__ = code


def _try_imported(mutant: Mutant, tests: list[str]) -> Iterator[str]:
    code = mutant.compiled()

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return code

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != _dotted(mutant.module):
                return None
            return spec_from_file_location(
                name, mutant.module, loader=Loader(name, str(mutant.module))
            )

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    for name in list(sys.modules):
        if name.startswith(("lightyear_node", "tests")) and ".v1" not in name:
            del sys.modules[name]
    if pytest.main([*QUIET, *tests]) != pytest.ExitCode.OK:
        yield "(imported)"


def _fork(work: Callable[[], Iterator[Any]]) -> tuple[int, int]:
    """Run work that yields JSON in a child; exit code 1 if it yielded anything."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return reading, pid
    code = 0
    try:
        with os.fdopen(writing, "w") as output:
            for one in work():
                output.write(json.dumps(one) + "\n")
                code = 1
    except BaseException as problem:
        print(problem, file=sys.stderr)
        code = 2
    finally:
        os._exit(code)


def _in_child(work: Callable[[], Iterator[Any]]) -> list[Any]:
    reading, pid = _fork(work)
    with os.fdopen(reading) as output:
        lines = output.readlines()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 1:
        raise SystemExit("the tests must pass before mutants can be tried")
    return [json.loads(line) for line in lines]


def _ended(pipe: int, pid: int) -> tuple[str, int]:
    with os.fdopen(pipe) as output:
        line = output.readline()
    return json.loads(line) if line else "", os.waitpid(pid, 0)[1]


def _pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


# Report.


def report(chosen: Sequence[Mutant], results: dict[str, list[str]]) -> int:
    """Print a line per module and every survivor; returns the number of survivors."""
    print(f"\n{'module':24} mutants  killed  survived   share")
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant in chosen:
        kind = "survived" if _lives(results[mutant.name]) else "killed"
        for row in (_shown(mutant.module), "all"):
            rows[row][kind] += 1
    rows["all"] = rows.pop("all", Counter())
    for name, row in rows.items():
        share = row["killed"] / max(1, row.total())
        print(f"{name:24} {row.total():7} {row['killed']:7} {row['survived']:9} {share:7.1%}")
    survivors = [one for one in chosen if _lives(results[one.name])]
    for mutant in survivors:
        where = mutant.module.relative_to(ROOT)
        print(f"\n{where}:{mutant.line} {mutant.function} ({results[mutant.name][0]})")
        print(f"  - {mutant.before}\n  + {mutant.after}")
    return len(survivors)


def _worth(test: str) -> int:
    """Golden tests compare whole transcripts and detect most changes."""
    return 4 if "golden" in test else 1


def _equivalents() -> set[str]:
    return set().union(*tomllib.loads(EQUIVALENT.read_text()).values())


def _is_listed(mutant: Mutant, listed: set[str]) -> bool:
    """By its name, or with `=> *` for every change of the line."""
    return mutant.name in listed or mutant.name.partition(" => ")[0] + " => *" in listed


def _lives(result: Sequence[str]) -> bool:
    return result[0] in (SURVIVED, UNREACHED)


def _earlier() -> dict[str, list[str]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _save(results: dict[str, list[str]]) -> None:
    RESULTS.write_text(json.dumps(results, indent=0))


def _shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


if __name__ == "__main__":
    sys.exit(main())
