"""Shell completion in a real bash, with the script that `--show-completion` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.journals import a_federation
from tests.support.needs import need_tool
from tests.support.terminal import DEADLINE_S, environment


def complete(line: str, cwd: Path) -> list[str]:
    """Return what bash offers at the end of this line."""
    program = cwd / "bin/lightyear-node"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightyear_node "$@"\n')
    program.chmod(0o755)
    script = f"""
source <(lightyear-node --show-completion) || exit 9
complete -p lightyear-node >&2 || exit 8
COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{"COMP_WORDS+=(''); COMP_CWORD=$((COMP_CWORD + 1))" if line.endswith(" ") else ""}
_lightyear_node_completion lightyear-node
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    need_tool("bash")
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=cwd,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout.split()


def test_bash_completes_commands_peers_and_rounds(tmp_path: Path) -> None:
    sites = a_federation(tmp_path)
    home = sites / "site-a"
    assert complete("lightyear-node sta", home) == ["start", "status"]
    names = ["site-a", "site-b", "site-c"]
    assert complete("lightyear-node peers block si", home) == names
    assert complete("lightyear-node peers show site-b", home) == ["site-b"]
    assert complete("lightyear-node peers ping site-a ", home) == ["site-b", "site-c"]
    assert complete("lightyear-node explain --round 1 --peer ", home) == names
    assert complete("lightyear-node rounds show ", home) == ["2", "1", "0"]
    assert complete("lightyear-node peers show --home site-b ", sites) == names


def test_completion_is_silent_without_valid_files(tmp_path: Path) -> None:
    assert complete("lightyear-node peers block ", tmp_path) == []
    (tmp_path / "peers.yaml").write_text("peers: [1, 2")
    (tmp_path / "node.yaml").write_text("nonsense")
    assert complete("lightyear-node peers block ", tmp_path) == []
    assert complete("lightyear-node rounds show ", tmp_path) == []
