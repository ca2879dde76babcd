"""What a generation reports: frozen dataclasses, and how they come out of the protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from protos import coordinator_pb2 as pb
from protos import model_pb2


@dataclass(frozen=True)
class Message:
    """One message of a dialogue; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-generation token
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_END = "context_end"
    ABORTED = "aborted"
    UNKNOWN = "unknown"  # a reason that this client is too old for


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural-log probability. `text` is its bytes, maybe part of a UTF-8 character."""

    token_id: int
    logprob: float
    text: bytes


@dataclass(frozen=True)
class TokenInfo:
    """A drawn token, and the most likely ones at its place, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Started:
    """First event: the request is accepted and its prompt is tokenised."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    context_length: int


@dataclass(frozen=True)
class Delta:
    """More of the answer. `text` holds whole characters; ids and infos come when asked for."""

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True)
class Finished:
    """Last event. Times are seconds as the coordinator measured them."""

    reason: FinishReason
    stop_string: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    context_length: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took; 0 when there was only one."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 else 0.0


Event = Started | Delta | Finished


def event_from_proto(response: pb.GenerateResponse | pb.ChatResponse) -> Event | None:
    """The event a response carries; None for a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(
                started.request_id,
                started.model,
                started.prompt_tokens,
                started.seed,
                started.context_length,
            )
        case "delta":
            delta = response.delta
            infos = (TokenInfo(_logprob(info.chosen), _logprobs(info.top)) for info in delta.tokens)
            return Delta(delta.text, tuple(delta.token_ids), tuple(infos))
        case "finished":
            finished = response.finished
            return Finished(
                reason=_REASONS.get(finished.reason, FinishReason.UNKNOWN),
                stop_string=finished.stop_string,
                prompt_tokens=finished.prompt_tokens,
                generated_tokens=finished.generated_tokens,
                cached_tokens=finished.cached_tokens,
                queue_s=finished.queue_s,
                prefill_s=finished.prefill_s,
                decode_s=finished.decode_s,
                context_length=finished.context_length,
            )
    return None


_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_MAX_TOKENS: FinishReason.MAX_TOKENS,
    pb.FINISH_REASON_CONTEXT_END: FinishReason.CONTEXT_END,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}


def _logprob(message: model_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.text)


def _logprobs(messages: Iterable[model_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(_logprob(message) for message in messages)
