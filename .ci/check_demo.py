"""Reads the demo's JSON and says whether the federation did what it is for."""

import json
import sys
from pathlib import Path

document = json.loads(Path(sys.argv[1]).read_text().splitlines()[-1])
assert (document["schema_version"], document["status"]) == ("1", "ok"), document
data = document["data"]
verdicts = data["verdicts"]
honest = [site for site in data["sites"] if not site["malfunctioning"]]
alone = sum(site["metric_alone"] for site in honest) / len(honest)
federated = sum(site["metric_federated"] for site in honest) / len(honest)
print(f"alone {alone:.3f}, federated {federated:.3f}, everyone {data['everyone_averaged']:.3f}")
print(verdicts)
assert verdicts["malfunctioning_accepted"] == 0, "a malfunctioning update was accepted"
assert verdicts["malfunctioning_rejected"] > 0, "no site rejected the malfunctioning site"
assert verdicts["honest_accepted"] > verdicts["honest_rejected"], "honest sites were shut out"
assert federated > alone, "the federation did not help"
assert federated > data["everyone_averaged"], "the rule did not help"
assert Path(data["report"]).is_file(), "no report"
