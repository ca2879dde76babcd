"""Chooses the carrier of a link: the fastest that both ends have and that passes its self-test."""

from __future__ import annotations

from common.errors import PipeLLMError
from common.log import get_logger
from protos import stage_pb2
from stage.links.base import Link, OnBroken
from stage.links.grpc_link import GrpcLink
from stage.links.shm_link import ShmLink


def connect(
    request: stage_pb2.AttachLinkRequest,
    boot_id: str,
    carrier: str,
    max_payload_bytes: int,
    on_broken: OnBroken,
) -> Link:
    """The link that `request` asks for; `carrier` is "auto" or the only one to be tried.

    Raises UnavailableError when none reaches the next stage, CorruptDataError when what came back from it
    was not what was sent."""
    if carrier == "shm" or (carrier == "auto" and request.next_boot_id == boot_id):
        try:
            return ShmLink(
                request.next_instance_id, request.epoch, request.next_window, max_payload_bytes, on_broken
            )
        except PipeLLMError as error:
            if carrier == "shm":
                raise
            get_logger().warning("link_falls_back", to="grpc", reason=str(error))
    return GrpcLink(request.next_address, request.epoch, request.next_window, on_broken)
