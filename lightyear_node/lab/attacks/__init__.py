"""Known attacks of the literature, as malfunctions of simulated sites.

Each attack is a function `attack(update, context, **options) -> {name: tensor}`, as described in
`lab.malfunction_plugins`; `lab.malfunctions.ATTACKS` gives it a name.  The adversary is rushing: it
sees the honest updates of the round.  Its sites collude: whatever one of them knows, all know.

Modules:

    statistical      from means and deviations of updates: alie, ipm, min-max, min-sum
    layers           changes to single layers: clipped-bias, layer-swap, rescale
    label_poison     training on wrong labels: targeted-flip, boiling-frog, sybil
    backdoors        a trigger in the input: backdoor, backdoor-search
    adaptive         optimized against the guard: adaptive-grey, adaptive-white, sleeper, overfit-v
    colluding        what all colluders know, in an order that all share
    weights_math     sums and distances of tensors by name
    victim           the attacked site: its model, and the guard as the adversary computes it
    loss_gradient    gradients of a loss at given weights, and steps along them
    option_values    checks of the attacks' options
"""
