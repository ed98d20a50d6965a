"""Runs a fuzz target with atheris for some time, and reports the findings.

Each target is a module in this folder with `seeds()`, the initial inputs, and `check()`, which
raises only if an invariant is violated.  Fuzzing runs in a child process; an input that violates an
invariant is printed in hexadecimal, to be repeated with --input.

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

TARGETS = ("peer_messages", "chunks", "config_files", "invites")
INSTRUMENTED = ["lightyear_node", "yaml", *TARGETS]
INPUT_BYTES_MAX = 4096
INPUT_S_MAX = 30
"""Wall-clock time; on a busy machine, 1 ms of work has taken 9 s."""
MEMORY_MB_MAX = 1024
OUTPUT_CHARS_MAX = 4000


def fuzz(target: str, corpus: Path, arguments: list[str]) -> None:
    """Runs in the child process; never returns."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        module = importlib.import_module(target)
    # Written here, because seeds are signed with keys that every process generates.
    for seed in module.seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    words = getattr(module, "WORDS", "").split()
    if words:
        dictionary = corpus.with_suffix(".words")
        dictionary.write_text("".join(f'"{word}"\n' for word in words))
        arguments = [f"-dict={dictionary}", *arguments]
    atheris.Setup([target, *arguments, str(corpus)], module.check)
    atheris.Fuzz()


def run(target: str, seconds: int, corpus: Path) -> bool:
    """Fuzz one target and print one JSON object; returns whether no invariant was violated."""
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = len(list(importlib.import_module(target).seeds()))
    with tempfile.TemporaryDirectory() as findings:
        command = [sys.executable, __file__, target, "--child", str(corpus)]
        command += [f"-artifact_prefix={findings}/", f"-max_total_time={seconds}"]
        command += [f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}"]
        command += [f"-rss_limit_mb={MEMORY_MB_MAX}", "-print_final_stats=1", "-verbosity=1"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = sorted(path.read_bytes().hex() for path in Path(findings).iterdir())
    output = done.stdout + done.stderr
    executions = re.search(r"number_of_executed_units: (\d+)", output)
    healthy = done.returncode == 0 and not found and executions is not None
    if not healthy:
        begin = max(0, output.find("Uncaught Python exception"))
        print(output[begin : begin + OUTPUT_CHARS_MAX], file=sys.stderr)
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
    parser.add_argument("--corpus", type=Path, help="folder of corpora to start from and to extend")
    parser.add_argument("--input", type=bytes.fromhex, help="check this input, without atheris")
    arguments = parser.parse_args()
    targets = TARGETS if arguments.target == "all" else (arguments.target,)
    if arguments.input is not None:
        for target in targets:
            importlib.import_module(target).check(arguments.input)
        return
    if importlib.util.find_spec("atheris") is None:
        sys.exit(
            "atheris is not installed: `make fuzz` installs it, on Linux; --input does not need it"
        )
    with tempfile.TemporaryDirectory() as scratch:
        corpora = arguments.corpus or Path(scratch)
        healthy = [run(target, arguments.seconds, corpora / target) for target in targets]
    sys.exit(0 if all(healthy) else 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
