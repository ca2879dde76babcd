"""Which stages there are: registration, leases, and the channels to them.

Time is handed in (seconds of a monotonic clock). What is loaded on a stage is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from common import rpc
from common.errors import InvalidRequestError, NotReadyError, PipeLLMError, UnavailableError
from protos import coordinator_pb2, model_pb2, stage_pb2, stage_pb2_grpc

_PROBE_TIMEOUT_S = 1.5  # within a stage's own patience with RegisterStage
_MAX_ID_CHARS = 200
_MAX_DEPARTED = 32  # remembered for status


@dataclass
class Member:
    """A registered stage. Compared by identity: a restarted stage is another member."""

    stage_id: str
    instance_id: str
    address: str
    device: model_pb2.DeviceInfo
    expires_at: float
    channel: grpc.aio.Channel
    stub: stage_pb2_grpc.StageServiceStub

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class StageError(Exception):
    """A call on a stage failed; carries the member and the error for people."""

    def __init__(self, member: Member, error: PipeLLMError, reported: bool = False) -> None:
        super().__init__(str(error))
        self.member = member
        self.error = error
        self.reported = reported  # by the stage itself, which is alive then


def reason_of(member: Member, error: PipeLLMError) -> str:
    """The error's text, to stand after the stage's name: what names the stage itself begins with "it"."""
    text = str(error)
    for name in (f"stage {member.stage_id!r} at {member.address}", f"stage {member.stage_id!r}",
                 f"stage {member.stage_id}"):  # fmt: skip
        if text.startswith(f"{name}: "):
            return text.removeprefix(f"{name}: ")
        if text.startswith(f"{name} "):
            return "it" + text.removeprefix(name)
    return text


@contextmanager
def calling(member: Member) -> Iterator[None]:
    """Everything that a call on the member's channel may raise becomes StageError.

    That includes the channel's being closed under the call, when the member is lost meanwhile: gRPC raises
    CancelledError then, which must not be taken for the cancellation of the task that waits."""
    peer = f"stage {member.stage_id!r} at {member.address}"
    lost = UnavailableError(f"{peer} was lost")
    try:
        yield
    except grpc.RpcError as error:
        reported = rpc.rpc_status_of(error) is not None
        raise StageError(member, rpc.from_rpc_error(error, peer), reported) from error
    except grpc.aio.UsageError as error:
        raise StageError(member, lost) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StageError(member, lost) from error


def check_registration(request: coordinator_pb2.RegisterStageRequest) -> str:
    """The address to dial. Raises NotReadyError or InvalidRequestError for what could never be a stage."""
    for name in ("stage_id", "instance_id"):
        value = getattr(request, name)
        if not 0 < len(value) <= _MAX_ID_CHARS or not value.isprintable():
            raise InvalidRequestError(
                f"RegisterStage: {name} {value[:40]!r} must have 1 to {_MAX_ID_CHARS} printable characters"
            )
    if request.protocol_version != rpc.PROTOCOL_VERSION:
        raise NotReadyError(
            f"stage {request.stage_id!r} speaks protocol version {request.protocol_version}, this "
            f"coordinator {rpc.PROTOCOL_VERSION}; run the same PipeLLM release on both"
        )
    address = rpc.check_address(request.address)
    if address.endswith(":0"):
        raise InvalidRequestError(f"RegisterStage: nobody can dial port 0 ({address})")
    return address


async def prove_reachable(request: coordinator_pb2.RegisterStageRequest) -> None:
    """Raises UnavailableError unless the stage answers where it says: one that cannot be reached (a wrong
    --advertise, a firewall) would make every plan with it fail. Also what `check_registration` raises."""
    address = check_registration(request)
    peer = f"stage {request.stage_id!r} at {address}"
    async with rpc.dial_async(address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        try:
            answer = await stub.Describe(stage_pb2.DescribeRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise UnavailableError(f"{rpc.from_rpc_error(error, peer)}; check its --advertise") from error
    if answer.instance_id != request.instance_id:
        raise UnavailableError(f"at {address} answers another process than stage {request.stage_id!r}")


@dataclass(frozen=True)
class Departed:
    """A stage that was here, for `status`."""

    stage_id: str
    address: str
    device: model_pb2.DeviceInfo
    reason: str


class Membership:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._members: dict[str, Member] = {}
        self._departed: dict[str, Departed] = {}

    @property
    def members(self) -> list[Member]:
        """In order of stage_id."""
        return [self._members[stage_id] for stage_id in sorted(self._members)]

    @property
    def departed(self) -> list[Departed]:
        return [self._departed[stage_id] for stage_id in sorted(self._departed)]

    def register(
        self, request: coordinator_pb2.RegisterStageRequest, now: float
    ) -> tuple[Member, bool, Member | None]:
        """Registers a stage or renews its lease: the member, whether it is new, and the one it took over
        from, if any.

        Raises NotReadyError for another protocol version, InvalidRequestError for an address that cannot be
        dialled, UnavailableError for a second stage under a living one's id: that one's lease may end."""
        address = check_registration(request)
        member = self._members.get(request.stage_id)
        previous = None
        is_new = False
        if member is None or member.instance_id != request.instance_id or member.address != address:
            is_new, previous = True, member
            # At the same address it can only be a restart: two processes do not share one.
            if previous is not None and previous.address != address and previous.expires_at >= now:
                raise UnavailableError(
                    f"a stage at {previous.address} is registered as {request.stage_id!r}; give each stage "
                    "its own --stage-id (after a restart: its lease ends soon)"
                )
            channel = rpc.dial_async(address)
            member = Member(
                request.stage_id, request.instance_id, address, request.device, now, channel,
                stage_pb2_grpc.StageServiceStub(channel),
            )  # fmt: skip
            self._members[request.stage_id] = member
            self._departed.pop(request.stage_id, None)
        member.device = request.device
        member.expires_at = now + self._lease_s
        return member, is_new, previous

    def find(self, stage_id: str, instance_id: str) -> Member | None:
        member = self._members.get(stage_id)
        return member if member is not None and member.instance_id == instance_id else None

    def expired(self, now: float) -> list[Member]:
        return [member for member in self.members if member.expires_at < now]

    def remove(self, member: Member, reason: str) -> None:
        """Forgets a member (it may register again); the caller closes its channel."""
        if self._members.get(member.stage_id) is member:
            del self._members[member.stage_id]
            self._departed[member.stage_id] = Departed(
                member.stage_id, member.address, member.device, reason
            )
            if len(self._departed) > _MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]
