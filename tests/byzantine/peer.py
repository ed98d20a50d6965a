"""A member of a running federation that misbehaves, as a process of its own.

Needs the home of the site whose keys it uses, and the home of the node that it bothers; the former
must not be running.  Serves and calls until it is told to stop, or for so many seconds.

    python tests/byzantine/peer.py --home site-b --node site-a --behaviour bomb
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

import calls  # noqa: F401 - adds its behaviours
from behaviours import BEHAVIOURS
from member import Member


async def misbehave(home: Path, node: Path, names: list[str], seconds: float) -> None:
    async with Member(home, node) as member:
        await member.meet()
        for name in names:
            print(name, flush=True)
            await BEHAVIOURS[name](member)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="of the site that we are")
    parser.add_argument("--node", type=Path, required=True, help="of the node to bother")
    parser.add_argument(
        "--behaviour", action="append", required=True, choices=sorted(BEHAVIOURS), metavar="NAME",
        help=f"one after the other: {', '.join(sorted(BEHAVIOURS))}",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each of them")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(misbehave(given.home, given.node, given.behaviour, given.seconds))


if __name__ == "__main__":
    main()
