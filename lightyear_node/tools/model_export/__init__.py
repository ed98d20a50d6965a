"""Exports a model from a node's state directory: the weights, and a model card.

Reads the state directory without its lock, so that a node may be running, and changes nothing in
it.  Never imports torch: tensors are copied as bytes.

Modules:

    stored_models  which rounds' models are stored
    tensors        tensors as bytes: read from and written to safetensors files
    model_card     the card: origin of the model, for programs and people
    export_file    writes model and card completely or not at all
"""

from __future__ import annotations

from enum import StrEnum


class ModelKind(StrEnum):
    """The shared model; the personal one that rules such as Ditto train; the one trained alone."""

    SHARED = "shared"
    PERSONAL = "personal"
    ALONE = "alone"
