import pytest

from common import rpc
from common.errors import InvalidRequestError, NotReadyError, UnavailableError
from coordinator.membership import Membership, reason_of
from protos import coordinator_pb2


def request(stage_id="s0", instance_id="i0", address="127.0.0.1:5", version=rpc.PROTOCOL_VERSION):
    return coordinator_pb2.RegisterStageRequest(
        stage_id=stage_id, instance_id=instance_id, address=address, protocol_version=version
    )


@pytest.fixture
def membership(event_loop_running):
    return Membership(lease_s=3.0)


@pytest.fixture
def event_loop_running():
    """Channels of grpc.aio are made for a running loop."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()


def test_a_stage_registers_and_renews(membership):
    member, is_new, previous = membership.register(request(), now=0.0)
    assert is_new and previous is None
    again, is_new, previous = membership.register(request(), now=2.0)
    assert again is member and not is_new and previous is None
    assert membership.expired(4.9) == []
    assert membership.expired(5.1) == [member]


def test_a_restarted_stage_takes_over_from_its_old_process(membership):
    old, _, _ = membership.register(request(), now=0.0)
    new, is_new, previous = membership.register(request(instance_id="i1"), now=1.0)
    assert is_new and previous is old and new is not old


def test_a_second_stage_under_a_living_one_s_id_has_to_wait_for_its_lease(membership):
    old, _, _ = membership.register(request(), now=0.0)
    other = request(instance_id="i1", address="127.0.0.1:6")
    with pytest.raises(UnavailableError, match="its own --stage-id"):
        membership.register(other, now=1.0)
    assert membership.members == [old]
    _, is_new, previous = membership.register(other, now=3.5)
    assert is_new and previous is old


def test_a_removed_stage_is_remembered_until_it_comes_back(membership):
    member, _, _ = membership.register(request(), now=0.0)
    membership.remove(member, "it was shut down")
    assert membership.members == []
    assert [(one.stage_id, one.reason) for one in membership.departed] == [("s0", "it was shut down")]
    _, is_new, _ = membership.register(request(), now=1.0)
    assert is_new and membership.departed == []


def test_members_are_in_order_of_id(membership):
    for name in ("b", "c", "a"):
        membership.register(request(stage_id=name, instance_id=name), now=0.0)
    assert [member.stage_id for member in membership.members] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": 99}, NotReadyError, "protocol version 99"),
        ({"address": "nowhere"}, InvalidRequestError, "nowhere"),
        ({"address": "host:99999"}, InvalidRequestError, "host:99999"),
        ({"address": "unix:relative"}, InvalidRequestError, "absolute"),
        ({"stage_id": ""}, InvalidRequestError, "stage_id"),
    ],
)
def test_a_registration_that_cannot_be_used_is_refused(membership, changes, error, message):
    with pytest.raises(error, match=message):
        membership.register(request(**changes), now=0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stage 's0' at 127.0.0.1:5 cannot be reached (refused)", "it cannot be reached (refused)"),
        ("stage 's0' at 127.0.0.1:5 was lost", "it was lost"),
        ("stage s0: the link broke", "the link broke"),
        ("stage s0 was unloaded", "it was unloaded"),
        ("stage s00 was unloaded", "stage s00 was unloaded"),
        ("it ended the stream of steps", "it ended the stream of steps"),
    ],
)
def test_a_reason_does_not_name_its_stage_again(membership, text, reason):
    member, _, _ = membership.register(request(), now=0.0)
    assert reason_of(member, UnavailableError(text)) == reason
