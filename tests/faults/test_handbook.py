"""Executes docs/operators literally at four hospitals: the pages without incidents."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightyear_node.storage.hash_chain import Record
from tests.support.bad_network_setup import history
from tests.support.handbook import PAGES, Hospitals, MailStep, steps
from tests.support.needs import need
from tests.support.network_hosts import why_not
from tests.support.recorded_merges import (
    last_record,
    merged,
    wait_for_rounds,
    wait_until_all_merge_all,
)
from tests.support.site_lives import round_of, status_of, wait_for

FOUNDERS = ["hospital-a", "hospital-b", "hospital-c"]
GUEST = "hospital-d"
INSTALLED = {"air-gap.md", "upgrade.md"}
"""Pages that tests/deploy covers."""


@pytest.mark.parametrize("page", sorted({page.name for page in PAGES.glob("*.md")} - INSTALLED))
def test_every_command_of_the_handbook_is_run(page: str) -> None:
    """Commands for a node's operator; `make deploy` covers those for administrators."""
    text = (PAGES / page).read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    words = re.findall(r"`(lightyear-node [^`]+|[^`]+: \{[^`]+\})`", text)
    run = " ".join(any_hospital(step) for step in all_texts())
    for command in [*blocks, *words]:
        by_root = command.startswith("sudo ")
        assert by_root or any_hospital(command) in run, f"no test runs this: {command}"


def all_texts() -> Iterator[str]:
    for page in PAGES.glob("*.md"):
        if "<!-- at " in page.read_text():
            for step in steps(page.name):
                if not isinstance(step, MailStep):
                    yield step.text


def any_hospital(text: str) -> str:
    return re.sub(r"hospital-[a-d]", "hospital-x", " ".join(text.split()))


def test_the_handbook_works_as_written(tmp_path: Path) -> None:
    need(why_not("bash"))
    with Hospitals(tmp_path, [*FOUNDERS, GUEST]) as hospitals:
        create_a_federation(hospitals)
        add_and_remove_a_hospital(hospitals)
        renew_a_certificate(hospitals)
        restore_from_a_backup(hospitals)
        assert not hospitals.remaining_steps()
        for name in FOUNDERS:
            assert not (status_of(hospitals.home[name]) or {})["quarantined"]
            assert "Traceback" not in hospitals.log(name)


def create_a_federation(hospitals: Hospitals) -> None:
    page = "first-federation.md"
    hospitals.members = FOUNDERS
    made: dict[str, str] = {}
    while len(made) < len(FOUNDERS):
        made |= hospitals.follow(page, "keys")
    pins = {name: output.split()[1] for name, output in made.items()}
    for listed in hospitals.follow(page, "list").values():
        for name, pin in pins.items():
            assert any(pin in line and name in line for line in listed.splitlines()), listed
    for output in hospitals.follow(page, "check").values():
        assert output.count("refused") >= 2, output
    hospitals.follow(page, "start")
    wait_until_all_merge_all(hospitals)
    wait_for_rounds(hospitals, 2)
    for name, output in hospitals.follow(page, "look").items():
        assert f"{name} in first-steps" in output
        for other in hospitals.members:
            assert other == name or f"✓ {other} " in output, output


def add_and_remove_a_hospital(hospitals: Hospitals) -> None:
    page = "membership.md"
    hospitals.follow(page, "keys")
    for output in hospitals.follow(page, "add").values():
        assert GUEST in output
    [output] = hospitals.follow(page, "check").values()
    assert all(f"✓ {name} " in output for name in FOUNDERS), output
    begun = {name: round_of(hospitals.home[name]) for name in FOUNDERS}
    hospitals.follow(page, "start")
    hospitals.members = [*FOUNDERS, GUEST]
    wait_until_all_merge_all(hospitals)
    first = next(r for r in history(hospitals.home[GUEST]) if r.kind == "seal")
    assert first.round >= min(begun.values()), "it began in the others' round"

    hospitals.members = FOUNDERS
    hospitals.follow(page, "leave")
    assert hospitals.wait_for_end(GUEST) == 0
    hospitals.follow(page, "remove")
    wait_for(lambda: all(f"{GUEST} is removed" in hospitals.log(name) for name in FOUNDERS))
    since = {name: last_record(hospitals, name) for name in FOUNDERS}
    wait_until_all_merge_all(hospitals, since)
    assert not any(merged(hospitals, name, GUEST, since[name]) for name in FOUNDERS)


def renew_a_certificate(hospitals: Hospitals) -> None:
    page, renews = "certificates-renewal.md", "hospital-b"
    keys = hospitals.home[renews].directory / "keys" / "tls.crt"
    old = keys.read_bytes()
    hospitals.follow(page, "accept")
    assert keys.read_bytes() == old
    hospitals.follow(page, "activate")
    assert keys.read_bytes() != old
    hospitals.follow(page, "forget")
    since = {name: last_record(hospitals, name) for name in FOUNDERS}
    wait_until_all_merge_all(hospitals, since)
    for name, output in hospitals.follow(page, "look").items():
        assert all(other == name or f"✓ {other} " in output for other in FOUNDERS), output


def restore_from_a_backup(hospitals: Hospitals) -> None:
    """Restore first only the keys, then a state directory that is some rounds old."""
    page, name = "backup.md", "hospital-c"
    home = hospitals.home[name]
    hospitals.follow(page, "backup")
    hospitals.end(name)
    records = history(home)
    ruins = home.directory.with_name("ruins")
    home.directory.rename(ruins)
    home.directory.mkdir()
    shutil.copy(ruins / "lightyear-backup.tar.gz", home.directory)
    hospitals.follow(page, "unpack")
    hospitals.follow(page, "start with new state")
    wait_until_merged_again(hospitals, name)

    hospitals.end(name)
    image = home.directory.with_name("image")
    shutil.copytree(home.directory, image)
    hospitals.start(name)
    wait_until_merged_again(hospitals, name)
    hospitals.end(name)
    records += history(home)
    home.directory.rename(home.directory.with_name("overtaken"))
    image.rename(home.directory)
    hospitals.follow(page, "start recovered")
    wait_until_merged_again(hospitals, name)
    hospitals.follow(page, "verify")
    check_never_signed_twice(records + history(home))


def check_never_signed_twice(records: list[Record]) -> None:
    """Check that each round of a generation has one update, over all disks of the site."""
    sealed: dict[tuple[int, int], set[str]] = {}
    for record in records:
        if record.kind == "seal":
            update = record.body["update"]
            sealed.setdefault((update["generation"], record.round), set()).add(update["digest"])
    assert len({generation for generation, _ in sealed}) == 3, (
        "one generation for each state directory"
    )
    assert all(len(digests) == 1 for digests in sealed.values()), sealed


def wait_until_merged_again(hospitals: Hospitals, name: str) -> None:
    """Wait until it and the others merge each other's new updates."""
    home = hospitals.home[name]
    wait_for(lambda: (home.state_dir / "journal.db").exists() and status_of(home) is not None)
    since = {other: last_record(hospitals, other) for other in FOUNDERS}
    wait_until_all_merge_all(hospitals, since)
