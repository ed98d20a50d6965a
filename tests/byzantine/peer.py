"""Runs a misbehaving member of a running federation, as a separate process.

Needs the folder of the site whose keys it uses, which must not be running, and the folder of the
node that it attacks.  Runs until it is stopped, or for some seconds.

    python -m tests.byzantine.peer --home site-b --node site-a --behaviour bomb
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

import tests.byzantine.calls
import tests.byzantine.harmful_messages  # noqa: F401 - both add their behaviours
from tests.byzantine.behaviours import BEHAVIOURS
from tests.byzantine.member import Member


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
    parser.add_argument(
        "--home", type=Path, required=True, help="folder of the site to impersonate"
    )
    parser.add_argument("--node", type=Path, required=True, help="folder of the node to attack")
    parser.add_argument(
        "--behaviour", action="append", required=True, choices=sorted(BEHAVIOURS), metavar="NAME",
        help=f"may be repeated, they run in sequence: {', '.join(sorted(BEHAVIOURS))}",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3600.0, help="duration of each behaviour")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            misbehave(arguments.home, arguments.node, arguments.behaviour, arguments.seconds)
        )


if __name__ == "__main__":
    main()
