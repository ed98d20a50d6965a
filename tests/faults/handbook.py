"""The operators' handbook, acted out: every hospital on a host of its own, with its own folder.

A page says in comments, which readers do not see, where the commands that follow are typed, which
settings are made where, and which file is mailed to whom.  Commands are run as they are written;
one that starts a node goes on running.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from asking import DEADLINE_S
from hosts import Hosts

from lightyear_node.lab.federation import SiteHome, package_environment
from lightyear_node.records import PeerName

PAGES = Path(__file__).parents[2] / "docs" / "operators"
EVERYWHERE = "every hospital"
START = "lightyear-node start"
OLD = "SHA256:OLD"
"""Stands in a page for the fingerprint that an earlier step has named."""
_STEP = re.compile(
    r"<!-- (?:in (?P<settings>\S+) )?at (?P<where>[^:>]+): (?P<title>[^(>]+?)"
    r"(?: \((?:ends with (?P<code>\d+)|(?P<stays>goes on))\))? -->\s*"
    r"(?:```(?:bash|yaml)\n(?P<block>.*?)```|`(?P<words>[^`]+)`)"
    r"|<!-- mail (?P<file>\S+) from (?P<sender>\S+) to (?P<receivers>[^>]+?) -->",
    re.DOTALL,
)
"""Hospitals are listed with commas; `every hospital` are those in the federation at that time."""


@dataclass(frozen=True, slots=True)
class Typed:
    """What is typed, and with which code it ends."""

    where: tuple[str, ...]
    title: str
    text: str
    code: int
    stays: bool
    """It goes on while other things are done."""


@dataclass(frozen=True, slots=True)
class Set:
    """What is written into a file of settings."""

    where: tuple[str, ...]
    title: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Mailed:
    file: str
    sender: str
    receivers: tuple[str, ...]


Step = Typed | Set | Mailed


def steps(page: str) -> Iterator[Step]:
    found = list(_STEP.finditer((PAGES / page).read_text()))
    assert found, f"{page} has nothing to do in it"
    for step in found:
        if step["file"]:
            yield Mailed(step["file"], step["sender"], _names(step["receivers"]))
            continue
        where, title, text = _names(step["where"]), step["title"], step["block"] or step["words"]
        if step["settings"]:
            yield Set(where, title, step["settings"], text)
        else:
            stays = text.startswith(START) or step["stays"] is not None
            yield Typed(where, title, text, int(step["code"] or 0), stays)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(","))


class Hospitals(Hosts):
    """Hosts on which nothing is installed but the command, and that know each other's names."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        homes = [SiteHome(PeerName(name), folder / name, None, "127.0.0.1:9464") for name in names]
        for home in homes:
            home.directory.mkdir()
        super().__init__(homes)
        self.home = {str(home.name): home for home in homes}
        self.members: list[str] = []
        """Whom `every hospital` means."""
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = package_environment() | {
            "PATH": f"{_command(folder)}{os.pathsep}{os.environ['PATH']}",
            "LIGHTYEAR_WORKER_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._pages: dict[str, Iterator[Step]] = {}
        self.examples = {OLD: OLD}
        """What stands in a page for something that only shows when it is followed."""

    def _moved(self, home: SiteHome) -> SiteHome:
        """There is nothing to move: what listens where, the handbook says."""
        return home

    def __enter__(self) -> Hospitals:
        super().__enter__()
        known = [f"{self.ip(home.name)} fl.{name}.example\n" for name, home in self.home.items()]
        for home in self.home.values():
            self.names(home.name, "127.0.0.1 localhost\n" + "".join(known))
        return self

    def __exit__(self, *why: object) -> None:
        for name in list(self._nodes):
            self.end(name, signal.SIGKILL)
        super().__exit__(*why)

    def follow(self, page: str, until: str, without: Collection[str] = ()) -> dict[str, str]:
        """Go on in a page, up to the next step of this title; what that said, by hospital.

        What was done in another way is left out.
        """
        left = self._pages.setdefault(page, steps(page))
        for step in left:
            if isinstance(step, Mailed):
                self._mail(step)
            elif step.title not in without:
                said = {where: self._do(where, step) for where in self._at_which(step)}
                if step.title == until:
                    return said
        raise AssertionError(f"{page} has no further step `{until}`")

    def unread(self) -> list[Step]:
        return [step for left in self._pages.values() for step in left]

    def type(self, name: str, script: str, code: int = 0) -> str:
        """What it says, to whichever stream."""
        for example, real in self.examples.items():
            script = script.replace(example, real)
        ended = subprocess.run(
            [*self._shell(name), script],
            cwd=self.home[name].directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, f"at {name}:\n{script}\n{said}"
        if named := re.search(r"--fingerprint (SHA256:\S+)`", ended.stderr):
            self.examples[OLD] = named[1]
        return said

    def settle(self, name: str, text: str, file: str = "node.yaml") -> None:
        """Write settings in place of those of the same name, as somebody does with an editor."""
        path = self.home[name].directory / file
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(text)))

    def start(self, name: str, script: str = f"{START} --peers peers.yaml") -> None:
        home = self.home[name]
        with home.log.open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                [*self._shell(name), f"exec {script}"],
                cwd=home.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        node = self._nodes.pop(name)
        node.send_signal(number)
        node.wait(60)

    def restart(self, name: str) -> None:
        self.end(name)
        self.start(name)

    def wait_for_end(self, name: str) -> int:
        return self._nodes.pop(name).wait(DEADLINE_S)

    def log(self, name: str) -> str:
        return self.home[name].log.read_text()

    def check(self) -> None:
        for name, node in self._nodes.items():
            assert node.poll() is None, f"{name} has ended:\n{self.log(name)[-3000:]}"

    def _at_which(self, step: Typed | Set) -> Iterable[str]:
        return self.members if step.where == (EVERYWHERE,) else step.where

    def _mail(self, letter: Mailed) -> None:
        for receiver in letter.receivers:
            sent = self.home[letter.sender].directory / letter.file
            shutil.copyfile(sent, self.home[receiver].directory / letter.file)

    def _do(self, name: str, step: Typed | Set) -> str:
        if isinstance(step, Set):
            self.settle(name, step.text, step.file)
        elif step.stays:
            self.start(name, step.text)
        else:
            return self.type(name, step.text, step.code)
        return ""

    def _shell(self, name: str) -> list[str]:
        there = ["ip", "netns", "exec", self._namespaces[PeerName(name)]]
        return [*there, "bash", "-euo", "pipefail", "-c"]


def _command(folder: Path) -> Path:
    """A folder with the command `lightyear-node`, which is that of this checkout."""
    tools = folder / "bin"
    tools.mkdir()
    command = tools / "lightyear-node"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightyear_node "$@"\n')
    command.chmod(0o755)
    return tools
