"""From a task to a table and a plot.  The cells (`# %%`) run in Jupyter, VS Code and Spyder."""

# %% A task is a function.  It does not know its site: `partition` divides its data.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightyear_node import Task, simulate


def digits(lr: float = 3e-3) -> Task:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    samples = TensorDataset(x.float() / 16, y)
    parts = random_split(samples, [0.5, 0.2, 0.3], torch.Generator().manual_seed(0))
    return Task(
        model=lambda: Sequential(Linear(64, 128), ReLU(), Linear(128, 10)),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr),
        train_data=DataLoader(parts[0], 32, shuffle=True),
        val_data=DataLoader(parts[1], 256),
        test_data=DataLoader(parts[2], 256),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
        epochs=2,
    )


# %% Three rules on the same uneven data; one of five sites sends flipped signs.
setting = {"sites": 5, "rounds": 6, "bad": 1, "partition": {"kind": "dirichlet", "alpha": 0.5}}
records = [
    {"rule": rule, **record}
    for rule in ("local", "fedavg", "lightyear")
    for record in simulate(digits, rule=rule, malfunction="sfa", **setting)
]

# %% The records are flat.  With pandas: frame = pandas.DataFrame(records), then
# frame[~frame.site_malfunctions].groupby(["rule", "round"])["merged.accuracy"].mean().unstack(0)
curves: dict[str, dict[int, list[float]]] = {}
for one in records:
    if one["kind"] == "round" and not one["site_malfunctions"]:
        at_round = curves.setdefault(one["rule"], {}).setdefault(one["round"], [])
        at_round.append(one["merged.accuracy"])
means = {rule: [sum(v) / len(v) for v in rounds.values()] for rule, rounds in curves.items()}

# %% Accuracy of the honest sites after each round.
figure, axes = plt.subplots()
for rule, values in means.items():
    axes.plot(range(1, len(values) + 1), values, label=rule)
axes.set(xlabel="round", ylabel="accuracy, mean of the honest sites")
axes.legend()
plt.show()
