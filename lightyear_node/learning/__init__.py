"""Pure tensor functions on networks and their weights.

Holds what the paper computes (agreement score, selection of peers, merge), the guard that LIGHTYEAR
adds, the other rules, and the weights file.  Nothing here depends on addresses, processes or the
network; only `weights` accesses the disk.

Modules:

    agreement          the paper's NTK agreement, in closed form
    jacobian           the kernel by definition, for final layers without a closed form
    softmax_kernel     the kernel of the class probabilities
    final_layer        finds a network's final layer
    outputs            the predictions in what a model returns
    forward            batches and inference mode for a forward pass
    validation         agreement and loss of models on the validation set
    chance             the loss of guessing, for any loss
    guard              checks that the agreement cannot make
    merge_check        measures the merged model before it is kept
    confirmation       which validation samples judge peers, and which confirm the merged model
    decisions          scores decisions sample by sample
    worth              compares the federated model with one trained alone
    batchnorm          BatchNorm statistics, estimated on the site's own data
    weights            weights files: layout, reading, writing
    exchanged_tensors  which tensors are exchanged, and under which name
    wrappers           models without the wrappers of torch.compile and data parallelism
    rules/             aggregation rules
"""

from lightyear_node.learning.agreement import ReferenceKernels, ntk_agreement, small_sample_floor
from lightyear_node.learning.exchanged_tensors import ExchangedTensors, exchanged, select
from lightyear_node.learning.final_layer import FinalLayer, FinalLayerKind, find_final_layers
from lightyear_node.learning.rules import Candidate, MergeShare, Rule, make_rule, shares_of
from lightyear_node.learning.validation import Validation, ValidationResult
from lightyear_node.learning.weights import (
    Layout,
    SchemaMismatch,
    Weights,
    header_bytes,
    load_into,
    rounded,
    write,
)

__all__ = [
    "Candidate",
    "ExchangedTensors",
    "FinalLayer",
    "FinalLayerKind",
    "Layout",
    "MergeShare",
    "ReferenceKernels",
    "Rule",
    "SchemaMismatch",
    "Validation",
    "ValidationResult",
    "Weights",
    "exchanged",
    "find_final_layers",
    "header_bytes",
    "load_into",
    "make_rule",
    "ntk_agreement",
    "rounded",
    "select",
    "shares_of",
    "small_sample_floor",
    "write",
]
