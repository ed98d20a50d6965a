"""Feeds one target with inputs that atheris invents, for so long, and tells what it found.

Each target is a file beside this one with `seeds()`, a few inputs to begin with, and `check()`,
from which nothing escapes unless a promise is broken.  Fuzzing happens in a child process; an input
that breaks a promise is printed as hexadecimal digits, to be tried again with --input.

    python tests/fuzz/run.py chunks --seconds 60
    python tests/fuzz/run.py chunks --input 00ff
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = ("spoken", "chunks", "agreements", "join_lines")
INSTRUMENTED = ["lightyear_node", "yaml", *TARGETS]
INPUT_BYTES_MAX = 4096
INPUT_S_MAX = 30
"""By the clock on the wall: on a busy machine a millisecond's work has taken nine seconds."""
MEMORY_MB_MAX = 1024
SAID_CHARS_MAX = 4000


def fuzz(target: str, corpus: Path, arguments: list[str]) -> None:
    """The child: never returns."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        module = importlib.import_module(target)
    # Made here, because seeds are signed with keys that are new in every process.
    for seed in module.seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    words = getattr(module, "WORDS", "").split()
    if words:
        listed = corpus.with_suffix(".words")
        listed.write_text("".join(f'"{word}"\n' for word in words))
        arguments = [f"-dict={listed}", *arguments]
    atheris.Setup([target, *arguments, str(corpus)], module.check)
    atheris.Fuzz()


def run(target: str, seconds: int, corpus: Path) -> bool:
    """Whether every promise was kept; prints one JSON object."""
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = len(list(importlib.import_module(target).seeds()))
    with tempfile.TemporaryDirectory() as findings:
        command = [sys.executable, __file__, target, "--child", str(corpus)]
        command += [f"-artifact_prefix={findings}/", f"-max_total_time={seconds}"]
        command += [f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}"]
        command += [f"-rss_limit_mb={MEMORY_MB_MAX}", "-print_final_stats=1", "-verbosity=1"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = sorted(path.read_bytes().hex() for path in Path(findings).iterdir())
    said = done.stdout + done.stderr
    executions = re.search(r"number_of_executed_units: (\d+)", said)
    healthy = done.returncode == 0 and not found and executions is not None
    if not healthy:
        begin = max(0, said.find("Uncaught Python exception"))
        print(said[begin : begin + SAID_CHARS_MAX], file=sys.stderr)
    summary = {
        "fuzz": target,
        "seconds": seconds,
        "executions": int(executions[1]) if executions else 0,
        "seeds": seeds,
        "corpus": len(list(corpus.iterdir())),
        "findings": found,
    }
    print(json.dumps(summary), flush=True)
    return healthy


def main() -> None:
    if sys.argv[2:3] == ["--child"]:
        fuzz(sys.argv[1], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--corpus", type=Path, help="keep what is learned here, and begin with it")
    parser.add_argument("--input", type=bytes.fromhex, help="try this one, without atheris")
    arguments = parser.parse_args()
    targets = TARGETS if arguments.target == "all" else (arguments.target,)
    if arguments.input is not None:
        for target in targets:
            importlib.import_module(target).check(arguments.input)
        return
    if importlib.util.find_spec("atheris") is None:
        sys.exit("atheris is not installed: `make fuzz` does that, on Linux; --input needs none")
    with tempfile.TemporaryDirectory() as scratch:
        corpora = arguments.corpus or Path(scratch)
        healthy = [run(target, arguments.seconds, corpora / target) for target in targets]
    sys.exit(0 if all(healthy) else 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
