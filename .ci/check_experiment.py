"""Reads a small experiment's results and says whether it did what experiments are for."""

import json
import sys
from pathlib import Path

document = json.loads(Path(sys.argv[1]).read_text())
folder = Path(sys.argv[2])
assert (document["schema_version"], document["status"]) == ("1", "ok"), document
assert document["data"]["failed"] == [], document["data"]["failed"]
rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
assert {row["task"] for row in rows} == {"femnist", "heart", "cxr_lungs"}
print(f"{len(rows)} federations")

guarded = [row for row in rows if row["rule"] == "lightyear" and row["rule_terms"]["guard"]]
for row in guarded:
    assert row["verdicts"].get("malfunctioning", {}).get("ok", 0) == 0, row
    assert row["malfunction"] != "none" or row["verdicts"]["honest"]["ok"] > 0, row
spoiled = [row for row in rows if row["rule"] == "fedavg" and row["malfunction"] == "sfa"]
local = {row["task"]: row for row in rows if row["rule"] == "local"}


def honest(row):
    bad = {site["name"] for site in row["sites"] if site["malfunctioning"]}
    sites = [site["final"] for site in row["sites"] if site["name"] not in bad]
    return sum(sites) / len(sites)


assert spoiled, "no averaging under attack"
for row in spoiled:
    assert honest(row) < honest(local[row["task"]]), "flipped signs did no harm to averaging"

messages = [json.loads(line) for line in (folder / "acceptance.jsonl").read_text().splitlines()]
faulty = {"ana", "sfa", "random", "head-flip", "head-scale", "bias-shift"}
taken = [one for one in messages if one["malfunction"] in faulty and one["guard"]]
assert taken == [], taken[:1]
assert any(one["paper"] for one in messages if one["malfunction"] == "head-flip")
print(f"{len(messages)} messages judged, no faulty weights accepted by the guard")

for name in ("table.md", "table.csv", "table.tex", "report.html", "manifest.json"):
    assert (folder / name).stat().st_size > 500, name
pictures = {path.stem for path in (folder / "figures").glob("*.svg")}
assert pictures == {path.stem for path in (folder / "figures").glob("*.png")}
assert len(pictures) >= 4, pictures
print("pictures:", ", ".join(sorted(pictures)))
