"""docs/operators, followed to the letter by four hospitals: those pages on which all goes well."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from handbook import PAGES, Hospitals, Mailed, steps
from hosts import why_not
from lives import round_of, status_of, wait_for
from merges import last_record, merged, wait_for_rounds, wait_until_all_merge_all
from needs import need
from staging import history

from lightyear_node.journal import Record

FOUNDERS = ["hospital-a", "hospital-b", "hospital-c"]
GUEST = "hospital-d"
INSTALLED = {"air-gap.md", "upgrade.md"}
"""Pages that tests/deploy is about."""


@pytest.mark.parametrize("page", sorted({page.name for page in PAGES.glob("*.md")} - INSTALLED))
def test_every_command_of_the_handbook_is_typed(page: str) -> None:
    """Those that an operator types with a node; what an administrator does is `make deploy`'s."""
    text = (PAGES / page).read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    words = re.findall(r"`(lightyear-node [^`]+|[^`]+: \{[^`]+\})`", text)
    typed = " ".join(any_hospital(step) for step in all_texts())
    for command in [*blocks, *words]:
        by_root = command.startswith("sudo ")
        assert by_root or any_hospital(command) in typed, f"no test types this: {command}"


def all_texts() -> Iterator[str]:
    for page in PAGES.glob("*.md"):
        if "<!-- at " in page.read_text():
            for step in steps(page.name):
                if not isinstance(step, Mailed):
                    yield step.text


def any_hospital(text: str) -> str:
    return re.sub(r"hospital-[a-d]", "hospital-x", " ".join(text.split()))


@pytest.mark.slow
def test_the_handbook_works_as_written(tmp_path: Path) -> None:
    need(why_not())
    with Hospitals(tmp_path, [*FOUNDERS, GUEST]) as hospitals:
        found_a_federation(hospitals)
        take_in_and_let_go(hospitals)
        renew_a_certificate(hospitals)
        come_back_from_a_backup(hospitals)
        assert not hospitals.unread()
        for name in FOUNDERS:
            assert not (status_of(hospitals.home[name]) or {})["quarantined"]
            assert "Traceback" not in hospitals.log(name)


def found_a_federation(hospitals: Hospitals) -> None:
    page = "first-federation.md"
    hospitals.members = FOUNDERS
    made: dict[str, str] = {}
    while len(made) < len(FOUNDERS):
        made |= hospitals.follow(page, "keys")
    pins = {name: said.split()[1] for name, said in made.items()}
    for listed in hospitals.follow(page, "list").values():
        for name, pin in pins.items():
            assert any(pin in line and name in line for line in listed.splitlines()), listed
    for said in hospitals.follow(page, "check").values():
        assert said.count("refused") >= 2, said
    hospitals.follow(page, "start")
    wait_until_all_merge_all(hospitals)
    wait_for_rounds(hospitals, 2)
    for name, said in hospitals.follow(page, "look").items():
        assert f"{name} in first-steps" in said
        for other in hospitals.members:
            assert other == name or f"✓ {other} " in said, said


def take_in_and_let_go(hospitals: Hospitals) -> None:
    page = "membership.md"
    hospitals.follow(page, "keys")
    for said in hospitals.follow(page, "add").values():
        assert GUEST in said
    [said] = hospitals.follow(page, "check").values()
    assert all(f"✓ {name} " in said for name in FOUNDERS), said
    begun = {name: round_of(hospitals.home[name]) for name in FOUNDERS}
    hospitals.follow(page, "start")
    hospitals.members = [*FOUNDERS, GUEST]
    wait_until_all_merge_all(hospitals)
    first = next(r for r in history(hospitals.home[GUEST]) if r.kind == "seal")
    assert first.round >= min(begun.values()), "it began where the others were"

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
    for name, said in hospitals.follow(page, "look").items():
        assert all(other == name or f"✓ {other} " in said for other in FOUNDERS), said


def come_back_from_a_backup(hospitals: Hospitals) -> None:
    """First only with its keys, then with a state directory that is some rounds old."""
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
    hospitals.follow(page, "start anew")
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
    """On however many disks a site has written: one round of one generation is one update."""
    sealed: dict[tuple[int, int], set[str]] = {}
    for record in records:
        if record.kind == "seal":
            update = record.body["update"]
            sealed.setdefault((update["generation"], record.round), set()).add(update["digest"])
    assert len({generation for generation, _ in sealed}) == 3, "one for each of its memories"
    assert all(len(digests) == 1 for digests in sealed.values()), sealed


def wait_until_merged_again(hospitals: Hospitals, name: str) -> None:
    """The others merge what it makes from now on, and it merges theirs."""
    home = hospitals.home[name]
    wait_for(lambda: (home.state_dir / "journal.db").exists() and status_of(home) is not None)
    since = {other: last_record(hospitals, other) for other in FOUNDERS}
    wait_until_all_merge_all(hospitals, since)
