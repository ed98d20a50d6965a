"""What the worker does for each job: opens the site once, then hands every job to it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.worker.jobs import Candidate, verdict_to_plain
from lightyear_node.worker.site import Site
from lightyear_node.worker.task import build_task
from lightyear_node.worker.train import Progress


class Duties:
    def __init__(self) -> None:
        self._site: Site | None = None

    def do(self, job: str, progress: Progress, **arguments: Any) -> dict[str, Any]:
        match job:
            case "open":
                return self._open(**arguments)
            case "initial":
                return self._initial(**arguments)
            case "train":
                return self._train(progress, **arguments)
            case "judge":
                return self._judge(progress, **arguments)
            case "take_in":
                return self._take_in(**arguments)
            case "merge":
                return self._merge(**arguments)
        raise ValueError(f"no such job: {job}")

    @property
    def _opened(self) -> Site:
        if self._site is None:
            raise ValueError("the first job must be `open`")
        return self._site

    def _open(
        self,
        *,
        entry: str,
        args: dict[str, Any],
        name: str,
        sites: list[str],
        seed: int,
        rule: dict[str, Any],
        rounds: int,
        device: str,
        threads: int,
        exchange: dict[str, Any],
        malfunction: dict[str, Any] | None,
    ) -> dict[str, Any]:
        if threads:
            torch.set_num_threads(threads)
        # A peer could send numbers so small that arithmetic on them takes a hundred times longer.
        torch.set_flush_denormal(True)
        torch.manual_seed(seed)
        context = {
            "site_name": name,
            "site_index": sites.index(name),
            "site_count": len(sites),
            "seed": seed,
        }
        self._site = Site(
            build_task(entry, args, context),
            name=name,
            seed=seed,
            rule=RuleTerms(**rule),
            rounds=rounds,
            device=device,
            exchange=ExchangeTerms(**exchange),
            malfunction=Malfunction(**malfunction) if malfunction else None,
        )
        return asdict(self._site.opened())

    def _initial(self, *, out: str, wire_header: str) -> dict[str, Any]:
        """The first model, and what every update of it begins with: too long for an answer."""
        site = self._opened
        site.write_initial(Path(out))
        Path(wire_header).write_bytes(site.wire.header)
        return {"wire_raw_bytes": site.wire.file_bytes}

    def _train(
        self,
        progress: Progress,
        *,
        round: int,
        base: str,
        carry: str | None,
        own: str,
        outgoing: str,
        carry_out: str,
    ) -> dict[str, Any]:
        trained = self._opened.train(
            base=Path(base),
            carry=Path(carry) if carry else None,
            round=round,
            own=Path(own),
            outgoing=Path(outgoing),
            carry_out=Path(carry_out),
            progress=progress,
        )
        return asdict(trained)

    def _take_in(self, *, path: str, out: str, as_peer: bool) -> dict[str, Any]:
        refused = self._opened.take_in(Path(path), Path(out), as_peer=as_peer)
        return {"refused": asdict(refused) if refused else None}

    def _judge(
        self,
        progress: Progress,
        *,
        round: int,
        own: str,
        before: str,
        carry: str | None,
        peers: list[dict[str, Any]],
        state: dict[str, Any],
    ) -> dict[str, Any]:
        judged = self._opened.judge(
            own=Path(own),
            before=Path(before),
            peers=[Candidate.from_plain(plain) for plain in peers],
            round=round,
            state=state,
            carry=Path(carry) if carry else None,
            progress=progress,
        )
        return {
            "verdicts": [verdict_to_plain(verdict) for verdict in judged.verdicts],
            "state": dict(judged.state),
        }

    def _merge(
        self, *, round: int, own: str, carry: str, accepted: list[dict[str, Any]], out: str
    ) -> dict[str, Any]:
        merged = self._opened.merge(
            own=Path(own),
            accepted=[(Candidate.from_plain(peer), peer["weight"]) for peer in accepted],
            round=round,
            out=Path(out),
            carry=Path(carry),
        )
        return asdict(merged)
