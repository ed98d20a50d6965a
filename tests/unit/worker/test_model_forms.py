"""Every form of model, batch and label is trained, judged and merged by the same site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightyear_node.errors import TaskFailed
from lightyear_node.learning import write
from lightyear_node.learning.forward import KeywordInputs
from lightyear_node.types import Digest, PeerName
from lightyear_node.worker.job_types import CandidateFile
from lightyear_node.worker.training import loss_of, split_batch
from tests.support.model_forms import FORMS
from tests.support.tiny_site import TinySite, task


def judged(site: TinySite, before: Path, peer: TinySite) -> Any:
    candidate = CandidateFile(PeerName("site-b"), str(peer.path("own")), 96, Digest("0" * 64))
    [verdict] = site.local_site.judge(
        own=site.path("own"), before=before, peers=[candidate], round=site.round
    ).verdicts
    return verdict


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_trained_judged_and_merged(tmp_path: Path, form: str) -> None:
    settings = FORMS[form]()
    ours = TinySite(tmp_path / "a", **settings)
    honest = TinySite(tmp_path / "b", **{**settings, "train_data": settings["train_data"][::-1]})
    broken = TinySite(tmp_path / "c", **settings)
    for site in (ours, honest, broken):
        site.train()
    assert ours.metrics["right"] > 0.6
    flipped = {name: -tensor for name, tensor in broken.weights("own").items()}
    verdict = judged(ours, ours.model, honest)
    assert verdict.accepted, verdict
    assert 0.6 < verdict.checks["agreement"] < 1
    write(broken.path("own"), broken.layout, flipped)
    assert not judged(ours, ours.model, broken).accepted
    ours.finish_round({"site-b": honest.path("own")})
    assert ours.metrics["right"] > 0.6


def test_a_hugging_face_batch_is_passed_by_name_with_its_labels() -> None:
    tokens, labels = torch.zeros(2, 3).long(), torch.zeros(2).long()
    batch = {"input_ids": tokens, "attention_mask": tokens, "labels": labels, "text": ["a", "b"]}
    x, y = split_batch(task(), batch)
    assert isinstance(x, KeywordInputs)
    assert set(x) == {"input_ids", "attention_mask", "labels"}
    assert y is labels
    assert split_batch(task(), {"pixel_values": tokens})[1] is None


@pytest.mark.parametrize(
    ("batch", "changed", "words"),
    [
        ((1, 2, 3), {}, "a batch has 3 entries"),
        ("text", {}, "a batch is a str"),
        ({"image": 1}, {}, 'no key "label"'),
        (1, {"prepare_batch": lambda batch: batch}, "prepare_batch returned int"),
    ],
)
def test_a_batch_of_another_form_is_explained(
    batch: Any, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskFailed, match=words) as caught:
        split_batch(task(**changed), batch)
    assert "prepare_batch" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"returned 4 numbers \(shape \(4,\)\), not one"),
        (lambda output, y: 0.5, "returned float, not a tensor"),
    ],
)
def test_a_loss_that_is_not_one_number_is_explained(loss: Any, words: str) -> None:
    with pytest.raises(TaskFailed, match=words) as caught:
        loss_of(task(loss=loss), torch.zeros(4, 3), torch.zeros(4).long())
    assert caught.value.hint
