"""Worker process of a malfunctioning site; `faulty_node` starts it instead of the ordinary one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.worker.jobs import serve

if TYPE_CHECKING:
    from lightyear_node.worker.site import LocalSite

MALFUNCTION = "--malfunction="


def main() -> None:
    option = next(argument for argument in sys.argv if argument.startswith(MALFUNCTION))
    malfunction = MalfunctionConfig.model_validate_json(option.removeprefix(MALFUNCTION))

    def make_site(*arguments: Any, **settings: Any) -> LocalSite:
        from lightyear_node.lab.faulty_site import FaultySite

        return FaultySite(*arguments, malfunction=malfunction, **settings)

    serve(make_site)


if __name__ == "__main__":
    main()
