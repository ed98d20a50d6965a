"""Operators' commands: recorded first, then executed, then answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightyear_node.errors import DiskFull
from lightyear_node.node.operator_commands import COMMANDS, OperatorCommands
from lightyear_node.protocol.events import Event, Unquarantined
from lightyear_node.types import PeerName

B, C = PeerName("site-b"), PeerName("site-c")


class CommandBench:
    """An operator's commands at a node that has `site-c` in quarantine."""

    def __init__(self, *, full: bool = False) -> None:
        self.happened: list[Any] = []
        memory = SimpleNamespace(blocked=frozenset(), quarantined={C: ()})
        round_journal = SimpleNamespace(memory=memory, operator=self._record)
        barrier = SimpleNamespace(parameters=SimpleNamespace(peers=(B, C)), paused=False)
        operator = OperatorCommands(barrier, round_journal, self._note, lambda gently: None)  # type: ignore[arg-type]
        self.routes = operator.routes()
        self._full = full

    def _record(self, command: str, about: dict[str, Any]) -> None:
        if self._full:
            raise DiskFull("No space left on device")
        self.happened.append((command, about))

    def _note(self, event: Event) -> None:
        self.happened.append(event)

    def type(self, command: str, **about: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.routes[command]({"ask": command, "user": "anna", **about})
        return answer


def test_unquarantine_records_the_operator() -> None:
    bench = CommandBench()
    answer = bench.type("unquarantine", peer=C)
    assert answer == {"done": f"{C} is out of quarantine; the proofs stay in the record"}
    assert bench.happened == [("unquarantine", {"peer": C, "user": "anna"}), Unquarantined(C)]


def test_unquarantine_of_a_trusted_peer_changes_nothing() -> None:
    bench = CommandBench()
    assert bench.type("unquarantine", peer=B) == {"done": f"{B} is not in quarantine"}
    assert bench.happened == []


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    bench = CommandBench()
    answer = bench.type("unquarantine", peer="site-cc")
    assert answer == {
        "refused": "there is no peer 'site-cc' here",
        "hint": f"did you mean {C}?",
    }
    assert bench.happened == []


def test_a_command_that_cannot_be_recorded_is_not_executed() -> None:
    bench = CommandBench(full=True)
    answer = bench.type("unquarantine", peer=C)
    assert "not recorded, and so not done" in answer["refused"]
    assert bench.happened == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_answered(command: str) -> None:
    answer = CommandBench().type(command, peer=C)
    assert len({"done", "refused"} & answer.keys()) == 1
