"""The verbs of a training script that a node runs (`task: {script: train.py}` in node.yaml).

    import lightyear_node.training as ly

    ly.init(model, val_data=val_loader, loss=F.cross_entropy)   # what peers are judged on
    ly.state(optimizer, scheduler=scheduler, progress=progress) # survives rounds and restarts
    while ly.running():
        ly.receive(model)                                       # the merged model of the last round
        train_one_epoch(model, optimizer)                       # the script's own code
        ly.send(model, metrics={"dice": dice}, samples=len(train_set))

Without a node the script still runs: the loop body once, and nothing is exchanged.

With Lightning or Hugging Face, `ly.patch(trainer)` replaces `receive`, `send` and `state`:

    ly.init(module, val_data=val_loader, loss=F.cross_entropy)
    ly.patch(trainer)
    while ly.running():
        trainer.fit(module, train_loader)                       # or trainer.train()

Modules:

    standalone     the verbs without a node
    lightning      every `fit` of a Lightning trainer is one round
    hugging_face   every `train` of a `transformers.Trainer` is one round
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from lightyear_node.errors import InvalidTask
from lightyear_node.training.standalone import StandaloneSession
from lightyear_node.worker.script import ScriptSession, current_session

__all__ = ["init", "patch", "progress", "receive", "running", "send", "state"]

Model = TypeVar("Model", bound=nn.Module)

_standalone: StandaloneSession | None = None


def init(
    model: Model | Callable[[], Model],
    *,
    val_data: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    metrics: Mapping[str, Any] | None = None,
    test_data: Iterable[Any] | None = None,
    samples: int | None = None,
    head: str | None = None,
    output: str | int | Callable[[Any], Any] | None = None,
    metric_inputs: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    prepare_batch: Callable[[Any], tuple[Any, Any]] | None = None,
) -> Model:
    """Describe the model and the private data that peers' models are judged on; call it once.

    The arguments are those of `Task`.  Every site must begin with equal weights: build the model
    before any other code draws random numbers (the node has set torch's seed), load it from the
    same file everywhere, or give a function that builds it.  Returns the model.
    """
    described = {
        "val_data": val_data,
        "loss": loss,
        "metrics": metrics or {},
        "test_data": test_data,
        "samples": samples,
        "head": head,
        "output": output,
        "metric_inputs": metric_inputs,
        "prepare_batch": prepare_batch,
    }
    made: Model = _session().init(model, **described)  # type: ignore[assignment]
    return made


def state(*objects: Any, **named: Any) -> None:
    """Name what must survive rounds and restarts besides the model.

    Objects with `state_dict` and `load_state_dict` (optimizer, scheduler, GradScaler), or dicts,
    which are changed in place.  They are saved by `send` and restored by `receive`.
    """
    _session().state(*objects, **named)


def running() -> bool:
    """Wait for the next round; False when the node stops."""
    return _session().running()


def receive(model: nn.Module) -> None:
    """Load the model of the last round and the state, and set the round's seeds.

    The seeds are those of `torch`, `random` and `numpy.random`: a round that is repeated after a
    crash gives the same weights.
    """
    _session().receive(model)


def send(
    model: nn.Module,
    *,
    metrics: Mapping[str, float] | None = None,
    samples: int | None = None,
) -> None:
    """End the round: hand over the trained model, save the state.

    `metrics` are the script's own numbers; without them those of `init` are measured.  `samples` is
    the number of training samples.
    """
    _session().send(model, metrics=metrics, samples=samples)


def progress(done: int, total: int) -> None:
    """Report progress by other units than optimizer steps, which are counted automatically.

    Call it at least once per `worker.silence` (10 minutes) in code that takes no steps.
    """
    _session().progress(done, total)


def patch(trainer: Any) -> None:
    """Make every `fit` of a Lightning trainer, or `train` of a Hugging Face one, one round.

    Call it once, after `init`.  The trainer's `max_epochs` or `max_steps` are those of one round.
    It receives, trains and sends; its optimizer, scheduler and precision continue.
    """
    session = _session()
    libraries = {one.__module__.partition(".")[0] for one in type(trainer).__mro__}
    if "transformers" in libraries and hasattr(trainer, "callback_handler"):
        from lightyear_node.training import hugging_face

        made = hugging_face.patch_trainer(trainer, session.receive, session.send, session.rounds)
        session.state(hugging_face=made)
    elif libraries & {"lightning", "pytorch_lightning"} and hasattr(trainer, "fit_loop"):
        from lightyear_node.training import lightning

        session.state(lightning=lightning.patch_trainer(trainer, session.receive, session.send))
        lightning.refuse_unsupported(trainer, session.model)
    else:
        raise InvalidTask(
            f"`patch` got a {type(trainer).__name__}, not a Lightning or Hugging Face trainer",
            hint="give it the trainer that the loop calls",
        )


def _session() -> ScriptSession | StandaloneSession:
    global _standalone
    session = current_session()
    if session is not None:
        return session
    if _standalone is None:
        _standalone = StandaloneSession()
    return _standalone
