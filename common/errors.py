"""The errors PipeLLM raises, and the one table that turns them into gRPC status codes.

Domain code raises a subclass of `PipeLLMError`; it never touches gRPC. The interceptors in
`common.rpc` map the class to a status through `status_code`, and map a status that comes back over the
wire to the class again through `from_status`, so that a client catches the same types a library user does.

A message says what was wrong, where (file, tensor, offset, field), and what to do about it.
"""

from __future__ import annotations

import grpc


class PipeLLMError(Exception):
    """Base of every error that is meant for a person. Raised directly it means an internal fault."""


class InvalidRequestError(PipeLLMError):
    """The request itself is wrong: a value out of range, an empty prompt, a bad shape."""


class UnknownModelError(PipeLLMError):
    """No such model, file or sequence."""


class ConfigError(InvalidRequestError):
    """A configuration file, flag or environment variable is wrong. Ends a daemon before it serves."""


class NotReadyError(PipeLLMError):
    """The state does not allow it now: stale plan, stage loading, files that differ between stages."""


class UnsupportedVersionError(NotReadyError):
    """A file version, byte order or protocol version this build does not speak."""


class OutOfCapacityError(PipeLLMError):
    """KV blocks, queue or memory are exhausted; the message gives the needed and the available number."""


class UnavailableError(PipeLLMError):
    """A stage was lost, the daemon drains, or nothing serves yet. Trying again later is right."""


class DeviceLostError(UnavailableError):
    """A GPU's context is broken (an illegal access, a lost device, no memory within a step): nothing that
    this process computes from here on can be trusted, so it ends, and its supervisor starts it anew."""


class UnsupportedModelError(PipeLLMError):
    """An architecture, hyperparameter, quantisation or tokenizer that this build does not implement."""


class CorruptDataError(PipeLLMError):
    """A GGUF file or a frame whose bytes contradict themselves (or that is another kind of file)."""


class DeadlineError(PipeLLMError):
    """A wait reached its deadline."""


class CancelledError(PipeLLMError):
    """The caller went away or asked to stop."""


# Most specific first: the first class an exception is an instance of decides.
_STATUS: tuple[tuple[type[PipeLLMError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (NotReadyError, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfCapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnsupportedModelError, grpc.StatusCode.UNIMPLEMENTED),
    (CorruptDataError, grpc.StatusCode.DATA_LOSS),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (CancelledError, grpc.StatusCode.CANCELLED),
)


def status_code(error: BaseException) -> grpc.StatusCode:
    """The gRPC status for `error`; INTERNAL for anything the table does not name."""
    return next((code for cls, code in _STATUS if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def from_status(code: grpc.StatusCode, message: str) -> PipeLLMError:
    """The exception a peer's status stands for; `PipeLLMError` itself for a code outside the table."""
    return next((cls for cls, known in _STATUS if known == code), PipeLLMError)(message)
