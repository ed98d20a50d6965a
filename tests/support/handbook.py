"""Executes the operators' handbook: every hospital has its own host and its own folder.

Hidden comments in a page name the hospital at which the following commands are typed, the file that
the following settings belong to, and the files that are mailed.  Commands run as they are written;
a command that starts a node keeps running.
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

from lightyear_node.lab.federation import SiteHome, package_environment
from lightyear_node.types import PeerName
from tests.support.network_hosts import Hosts
from tests.support.paths import DOCS
from tests.support.site_queries import DEADLINE_S

PAGES = DOCS / "operators"
EVERYWHERE = "every hospital"
START = "lightyear-node start"
OLD = "SHA256:OLD"
"""A page's placeholder for the fingerprint that an earlier step printed."""
_STEP = re.compile(
    r"<!-- (?:in (?P<settings>\S+) )?at (?P<where>[^:>]+): (?P<title>[^(>]+?)"
    r"(?: \((?:ends with (?P<code>\d+)|(?P<background>goes on))\))? -->\s*"
    r"(?:```(?:bash|yaml)\n(?P<block>.*?)```|`(?P<words>[^`]+)`)"
    r"|<!-- mail (?P<file>\S+) from (?P<sender>\S+) to (?P<receivers>[^>]+?) -->",
    re.DOTALL,
)
"""Hospitals are separated by commas; `every hospital` means the current members."""


@dataclass(frozen=True, slots=True)
class ShellStep:
    """A shell script and its expected exit code."""

    where: tuple[str, ...]
    title: str
    text: str
    code: int
    background: bool
    """It keeps running during the following steps."""


@dataclass(frozen=True, slots=True)
class SettingsStep:
    """Keys to write into a settings file."""

    where: tuple[str, ...]
    title: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class MailStep:
    """A file to copy to other hospitals."""

    file: str
    sender: str
    receivers: tuple[str, ...]


Step = ShellStep | SettingsStep | MailStep


def steps(page: str) -> Iterator[Step]:
    found = list(_STEP.finditer((PAGES / page).read_text()))
    assert found, f"{page} contains no steps"
    for step in found:
        if step["file"]:
            yield MailStep(step["file"], step["sender"], _names(step["receivers"]))
            continue
        where, title, text = _names(step["where"]), step["title"], step["block"] or step["words"]
        if step["settings"]:
            yield SettingsStep(where, title, step["settings"], text)
        else:
            background = text.startswith(START) or step["background"] is not None
            yield ShellStep(where, title, text, int(step["code"] or 0), background)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(","))


class Hospitals(Hosts):
    """Hosts with only the command installed, which resolve each other's names."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        homes = [SiteHome(PeerName(name), folder / name, None, "127.0.0.1:9464") for name in names]
        for home in homes:
            home.directory.mkdir()
        super().__init__(homes)
        self.home = {str(home.name): home for home in homes}
        self.members: list[str] = []
        """The hospitals that `every hospital` means."""
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = package_environment() | {
            "PATH": f"{_command(folder)}{os.pathsep}{os.environ['PATH']}",
            "LIGHTYEAR_WORKER_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._pages: dict[str, Iterator[Step]] = {}
        self.examples = {OLD: OLD}
        """Placeholders in the pages, and the values that running the steps produced."""

    def _relocated(self, home: SiteHome) -> SiteHome:
        """Return the home unchanged: the handbook sets the addresses."""
        return home

    def __enter__(self) -> Hospitals:
        super().__enter__()
        known = [f"{self.ip(home.name)} fl.{name}.example\n" for name, home in self.home.items()]
        for home in self.home.values():
            self.set_hosts_file(home.name, "127.0.0.1 localhost\n" + "".join(known))
        return self

    def __exit__(self, *why: object) -> None:
        for name in list(self._nodes):
            self.end(name, signal.SIGKILL)
        super().__exit__(*why)

    def follow(self, page: str, until: str, without: Collection[str] = ()) -> dict[str, str]:
        """Continue a page up to the next step with this title; return its output by hospital.

        Steps whose title is in `without` are skipped.
        """
        left = self._pages.setdefault(page, steps(page))
        for step in left:
            if isinstance(step, MailStep):
                self._mail(step)
            elif step.title not in without:
                output = {where: self._execute(where, step) for where in self._hospitals_of(step)}
                if step.title == until:
                    return output
        raise AssertionError(f"{page} has no further step `{until}`")

    def remaining_steps(self) -> list[Step]:
        return [step for left in self._pages.values() for step in left]

    def type(self, name: str, script: str, code: int = 0) -> str:
        """Run a script in the hospital's folder; return stdout and stderr."""
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
        output = ended.stdout + ended.stderr
        assert ended.returncode == code, f"at {name}:\n{script}\n{output}"
        if named := re.search(r"--fingerprint (SHA256:\S+)`", ended.stderr):
            self.examples[OLD] = named[1]
        return output

    def write_settings(self, name: str, text: str, file: str = "node.yaml") -> None:
        """Replace keys in a settings file, as with an editor."""
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

    def _hospitals_of(self, step: ShellStep | SettingsStep) -> Iterable[str]:
        return self.members if step.where == (EVERYWHERE,) else step.where

    def _mail(self, step: MailStep) -> None:
        for receiver in step.receivers:
            source = self.home[step.sender].directory / step.file
            shutil.copyfile(source, self.home[receiver].directory / step.file)

    def _execute(self, name: str, step: ShellStep | SettingsStep) -> str:
        if isinstance(step, SettingsStep):
            self.write_settings(name, step.text, step.file)
        elif step.background:
            self.start(name, step.text)
        else:
            return self.type(name, step.text, step.code)
        return ""

    def _shell(self, name: str) -> list[str]:
        there = ["ip", "netns", "exec", self._namespaces[PeerName(name)]]
        return [*there, "bash", "-euo", "pipefail", "-c"]


def _command(folder: Path) -> Path:
    """Create a folder with a command `lightyear-node` that runs this checkout."""
    tools = folder / "bin"
    tools.mkdir()
    command = tools / "lightyear-node"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lightyear_node "$@"\n')
    command.chmod(0o755)
    return tools
