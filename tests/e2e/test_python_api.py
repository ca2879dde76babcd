"""The Python API beyond plain requests: closing streams, asyncio, watching, templates."""

import asyncio
import gc

import pytest

from client import AsyncClient, Client, Delta, Finished, FinishReason, Message, Started
from common.errors import DeadlineError, InvalidRequestError, UnavailableError
from tests.e2e.daemons import Mesh

PROMPT = "Once upon a time"


def idle(mesh: Mesh) -> None:
    mesh.wait(lambda: mesh.client.status().requests_running == 0, "requests to end", 10)


def test_closing_a_stream_ends_it_and_its_request(mesh: Mesh) -> None:
    stream = mesh.client.generate(PROMPT, ignore_eos=True)
    assert isinstance(next(stream), Started) and isinstance(next(stream), Delta)
    stream.close()
    stream.close()
    assert list(stream) == []  # it ends, and raises nothing
    idle(mesh)


def test_leaving_the_block_or_forgetting_the_stream_cancels_too(mesh: Mesh) -> None:
    with mesh.client.generate(PROMPT, ignore_eos=True) as stream:
        next(stream)
    idle(mesh)
    next(mesh.client.generate(PROMPT, ignore_eos=True))
    gc.collect()
    idle(mesh)


def test_abort_finishes_by_name(mesh: Mesh) -> None:
    stream = mesh.client.generate(PROMPT, ignore_eos=True, request_id="mine")
    assert isinstance(next(stream), Started)
    assert mesh.client.abort("mine")
    *_, last = stream
    assert isinstance(last, Finished) and last.reason is FinishReason.ABORTED
    assert not mesh.client.abort("mine")


def test_template_and_chat_agree(mesh: Mesh) -> None:
    messages = [Message("system", "be brief"), {"role": "user", "content": "who is it"}]
    text, ids = mesh.client.apply_template(messages)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>") and text.endswith("assistant\n")
    started = next(mesh.client.chat(messages, max_tokens=1))
    assert isinstance(started, Started) and started.prompt_tokens == len(ids)
    with pytest.raises(InvalidRequestError, match="judge"):
        next(mesh.client.chat([Message("judge", "order")]))


def test_watch_status_goes_on(mesh: Mesh) -> None:
    with mesh.client.watch_status(0.1) as states:
        first, second = next(states), next(states)
    assert first.state == second.state == "ready" and second.uptime_s > first.uptime_s


def test_health_is_told_apart(mesh: Mesh) -> None:
    assert mesh.client.is_running() and mesh.client.is_ready()
    with Client("unix:/nonexistent/socket") as nobody:
        assert not nobody.is_running() and not nobody.is_ready()
        with pytest.raises(UnavailableError, match="unix:/nonexistent/socket cannot be reached"):
            nobody.status()


def test_asyncio_answers_like_the_blocking_client(mesh: Mesh) -> None:
    async def run() -> None:
        async with AsyncClient(mesh.address) as client:
            assert await client.is_running() and await client.is_ready()
            ids = await client.tokenize(PROMPT)
            assert ids == mesh.client.tokenize(PROMPT)
            assert await client.detokenize(ids) == mesh.client.detokenize(ids)
            assert await client.tokenize_pieces("a") == mesh.client.tokenize_pieces("a")
            assert await client.models() == mesh.client.models()
            assert (await client.status()).state == "ready"
            assert await client.apply_template([Message("user", "x")]) == mesh.client.apply_template(
                [Message("user", "x")]
            )
            assert not await client.abort("nobody")
            stream = client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
            same = mesh.client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
            text = "".join([event.text async for event in stream if isinstance(event, Delta)])
            assert text and text == "".join(event.text for event in same if isinstance(event, Delta))

    asyncio.run(run())


def test_asyncio_streams_close_and_cancel(mesh: Mesh) -> None:
    async def run() -> None:
        async with AsyncClient(mesh.address) as client:
            async with client.generate(PROMPT, ignore_eos=True) as stream:
                assert isinstance(await anext(stream), Started)
            assert [event async for event in stream] == []  # closed: it ends

            async def read() -> None:
                async for _ in client.generate(PROMPT, ignore_eos=True):
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(DeadlineError):
                async for _ in client.generate(PROMPT, ignore_eos=True, timeout_s=0.2):
                    pass
            with pytest.raises(InvalidRequestError, match="temperature"):
                await anext(client.generate(PROMPT, temperature=-1.0))
            async with client.watch_status(0.1) as states:
                assert (await anext(states)).state == "ready"
        await asyncio.to_thread(idle, mesh)

    asyncio.run(run())
