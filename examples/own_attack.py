"""An attack of your own against three rules: `python examples/own_attack.py`.

The attackers collude: each sends the mean of what they trained, moved against the direction in
which the honest sites move.  docs/own-attack.md describes what an attack gets and returns.
"""

from statistics import fmean

import torch

from lightyear_node import simulate

SETTING = {"arguments": {"epochs": 2}, "sites": 5, "rounds": 4, "bad": 2}


def push_back(update, context, strength: float = 2.0):
    ours = [update, *context.colluders.values()]
    honest = list(context.honest.values())
    sent = {}
    for name, start in context.start.items():
        mean = torch.stack([one[name] for one in ours]).mean(0)
        step = torch.stack([one[name] for one in honest]).mean(0) - start
        sent[name] = mean - strength * step
    return sent


def main() -> None:
    print(f"{'rule':10}  accuracy of the honest sites: without attack, with; attacks accepted")
    for rule in ("fedavg", "krum", "lightyear"):
        attacked = simulate("digits", rule=rule, malfunction=push_back, **SETTING)
        clean = simulate("digits", rule=rule, malfunction="none", **SETTING)
        # The same sites in both, although without attack all of them are honest.
        honest = {one["site"] for one in attacked if not one["site_malfunctions"]}
        means = [
            fmean(
                one["merged.accuracy"]
                for one in records
                if one["kind"] == "round" and one["round"] == 3 and one["site"] in honest
            )
            for records in (clean, attacked)
        ]
        sent = [one["verdict"] for one in attacked if one.get("peer_malfunctions")]
        accepted = f"{sent.count('accepted')} of {len(sent)}"
        print(f"{rule:10}  {means[0]:.3f}  {means[1]:.3f}  {accepted}")


if __name__ == "__main__":
    main()
