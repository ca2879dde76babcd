"""The client side of PipeLLM: `from client import Client, AsyncClient`.

Names are looked up when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.async_client import AsyncClient as AsyncClient
    from client.client import Client as Client
    from client.events import Delta as Delta
    from client.events import Event as Event
    from client.events import Finished as Finished
    from client.events import FinishReason as FinishReason
    from client.events import Message as Message
    from client.events import Started as Started
    from client.local import LocalMesh as LocalMesh

_HOME = {
    "AsyncClient": "client.async_client",
    "Client": "client.client",
    "Delta": "client.events",
    "Event": "client.events",
    "FinishReason": "client.events",
    "Finished": "client.events",
    "LocalMesh": "client.local",
    "Message": "client.events",
    "Started": "client.events",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
