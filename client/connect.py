"""Finding a mesh to chat with: the running coordinator's, else one of its own on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from client.client import Client
from client.local import LocalMesh
from client.mesh_state import Model
from client.progress import load_progress
from common.errors import (
    InvalidRequestError,
    NotReadyError,
    UnavailableError,
    UnknownModelError,
    UnsupportedModelError,
)


@dataclass(frozen=True)
class Target:
    """What the command line says: a coordinator's address, a model, and how to run one's own mesh.

    `model` is a name the coordinator knows, or a file. `local` or a number of CPU `stages` ask for a mesh
    of one's own even where a coordinator runs.
    """

    address: str
    model: str
    local: bool
    stages: int | None
    context_length: int
    threads: int


@contextmanager
def connected(target: Target) -> Iterator[tuple[Client, Model]]:
    """A client and the model it talks to: of the running coordinator, else of a mesh of its own."""
    own = target.local or target.stages is not None
    if not own:
        with Client(target.address) as client:
            if client.is_running():
                yield client, _served_model(client, target)
                return
        if not target.model:
            raise UnavailableError(
                f"no coordinator answers at {target.address}; start one, or name a model file to run "
                "in a mesh of its own: pipellm-client chat MODEL.gguf"
            )
    if not target.model:
        raise InvalidRequestError("a mesh of its own needs a model: pipellm-client chat MODEL.gguf")
    if not os.path.isfile(target.model):
        running = "" if own else f" (and no coordinator answers at {target.address})"
        raise UnknownModelError(f"{target.model}: no such file{running}")
    with ExitStack() as stack:
        with load_progress() as on_event:
            mesh = LocalMesh(
                target.model,
                stages=target.stages,
                context_length=target.context_length,
                threads=target.threads,
                on_event=on_event,
            )
            stack.enter_context(mesh)
        yield mesh.client, _with_template(mesh.model)


def _served_model(client: Client, target: Target) -> Model:
    """The model asked for, loaded if nothing is; without a wish, the one that is loaded."""
    models = client.models()
    names = ", ".join(model.name for model in models) or "none"
    loaded = next((model for model in models if model.loaded), None)
    if not target.model:
        if loaded:
            return _with_template(loaded)
        raise NotReadyError(
            f"the coordinator at {client.address} has no model loaded ({client.status().state}); say which: "
            f"pipellm-client chat NAME (there are: {names})"
        )
    path = os.path.abspath(target.model)
    wanted = next((model for model in models if target.model == model.name or path == model.path), None)
    if not wanted:
        raise UnknownModelError(
            f"the coordinator at {client.address} has no model {target.model!r} (it has: {names}); "
            "--local runs a file in a mesh of its own"
        )
    if loaded and not wanted.loaded:
        raise NotReadyError(
            f"the coordinator at {client.address} serves {loaded.name}; pipellm-client load "
            f"{wanted.name} changes that for everyone, --local runs a file in a mesh of its own"
        )
    if not loaded:
        with load_progress() as on_event, client.load_model(wanted.name) as events:
            for event in events:
                on_event(event)
    return _with_template(wanted)


def _with_template(model: Model) -> Model:
    if not model.has_chat_template:
        raise UnsupportedModelError(
            f"{model.name} has no chat template, so it cannot chat; pipellm-client generate continues a text"
        )
    return model
