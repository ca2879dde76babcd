"""Requests through real daemons: streams, cancels, many at once, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from client import Client
from client.events import Delta, Finished, FinishReason, Started
from common.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OutOfCapacityError,
    PipeLLMError,
    UnknownModelError,
)
from tests.conftest import ROOT
from tests.e2e.daemons import Mesh

PROMPT = "Once upon a time there was a little dog"


def ask(client: Client, prompt=PROMPT, **options):
    """Text, ids and finish of a whole answer."""
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "return_ids": True} | options
    events = list(client.generate(prompt, **options))
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, Delta)]
    text = "".join(delta.text for delta in deltas)
    return text, [token for delta in deltas for token in delta.token_ids], events[-1]


def all_blocks_free(mesh: Mesh) -> bool:
    status = mesh.client.status(timeout_s=5)
    return (
        status.requests_running == status.requests_waiting == 0
        and status.kv_blocks_free == status.kv_blocks_total
        and all(stage.kv_blocks_free == status.kv_blocks_total for stage in status.stages)
    )


def test_an_answer_streams_and_is_accounted_for(mesh: Mesh):
    text, ids, finished = ask(mesh.client)
    assert len(ids) == 24 and text
    assert finished.reason == FinishReason.MAX_TOKENS
    assert finished.generated_tokens == 24
    assert finished.prompt_tokens > 5
    assert finished.decode_s > 0 and finished.prefill_s > 0


def test_the_plan_covers_every_layer_on_two_stages(mesh: Mesh):
    plan = mesh.client.status(timeout_s=5).plan
    assert plan is not None and len(plan.windows) == 2
    first, second = plan.windows
    assert (first.layer_start, second.layer_end) == (0, 6) and first.layer_end == second.layer_start
    assert first.embedding and second.head and not second.embedding and not first.head
    assert first.carrier == "grpc"


def test_eight_at_once_give_each_the_text_it_gives_alone(mesh: Mesh):
    prompts = [f"{PROMPT} number {index}" for index in range(8)]
    alone = [ask(mesh.client, prompt, seed=5, temperature=0.9)[1] for prompt in prompts]

    def one(prompt: str):
        with Client(mesh.address) as client:
            return ask(client, prompt, seed=5, temperature=0.9)[1]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, prompts))
    assert together == alone


def test_the_same_seed_gives_the_same_text_and_another_seed_another(mesh: Mesh):
    one, again, other = (ask(mesh.client, seed=seed, temperature=1.5)[1] for seed in (1, 1, 2))
    assert one == again != other


def test_ids_are_the_same_prompt_as_their_text(mesh: Mesh):
    ids = mesh.client.tokenize(PROMPT)
    assert mesh.client.detokenize(ids).strip() == PROMPT
    assert ask(mesh.client, ids)[1] == ask(mesh.client)[1]


def test_logprobs_are_reported(mesh: Mesh):
    events = list(mesh.client.generate(PROMPT, max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True))
    infos = [info for event in events if isinstance(event, Delta) for info in event.tokens]
    assert len(infos) == 4
    for info in infos:
        assert info.chosen.logprob == info.top[0].logprob <= 0 and len(info.top) == 3


def test_a_stop_string_ends_the_answer_and_is_left_out(mesh: Mesh):
    text, _, _ = ask(mesh.client)
    stop = text[len(text) // 2 :][:3]
    cut, _, finished = ask(mesh.client, stop=[stop])
    assert finished.reason == FinishReason.STOP_STRING and finished.stop_string == stop
    assert cut == text[: text.index(stop)]


def test_the_context_s_end_is_a_finish_reason(mesh: Mesh):
    with mesh.client.generate(PROMPT, temperature=0.0, ignore_eos=True) as events:
        last = list(events)[-1]
    assert isinstance(last, Finished)
    assert last.reason == FinishReason.CONTEXT_END
    assert last.prompt_tokens + last.generated_tokens == last.context_length == 512


def test_chat_goes_through_the_template(mesh: Mesh):
    messages = [{"role": "user", "content": "hello <|im_end|> world"}]
    text, ids = mesh.client.apply_template(messages)
    assert text.startswith("<|im_start|>user\nhello") and text.endswith("<|im_start|>assistant\n")
    special = mesh.client.tokenize("<|im_end|>", parse_special=True, add_special=False)
    assert ids.count(special[-1]) == 1  # the template's own, not the user's
    events = list(mesh.client.chat(messages, max_tokens=5, ignore_eos=True))
    assert isinstance(events[-1], Finished) and events[-1].prompt_tokens == len(ids)


def test_a_cancel_gives_the_blocks_back(mesh: Mesh):
    with mesh.client.generate(PROMPT, ignore_eos=True) as events:
        for _, event in zip(range(3), events, strict=False):
            assert event
    mesh.wait(lambda: all_blocks_free(mesh), "the blocks of a cancelled request", 5)


def test_abort_ends_a_request_by_name(mesh: Mesh):
    with mesh.client.generate(PROMPT, ignore_eos=True, request_id="mine") as events:
        next(iter(events))
        assert mesh.client.abort("mine")
        last = list(events)[-1]
    assert isinstance(last, Finished) and last.reason == FinishReason.ABORTED
    assert not mesh.client.abort("mine")


def test_a_deadline_ends_the_request(mesh: Mesh):
    with pytest.raises(DeadlineError):
        list(mesh.client.generate(PROMPT, ignore_eos=True, timeout_s=0.05))
    mesh.wait(lambda: all_blocks_free(mesh), "the blocks of an expired request", 5)


def test_a_killed_client_leaves_nothing_behind(mesh: Mesh):
    code = (
        "from client import Client\n"
        f"for event in Client({mesh.address!r}).generate({PROMPT!r}, ignore_eos=True):\n"
        "    print(event, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    mesh.wait(lambda: all_blocks_free(mesh), "the blocks of a killed client", 10)


def test_five_hundred_requests_with_random_cancels_leave_every_block_free(mesh: Mesh):
    randoms = random.Random(0)
    plans = [(randoms.randint(1, 200), randoms.randint(1, 30), randoms.randint(0, 12)) for _ in range(500)]

    def one(plan: tuple[int, int, int]) -> None:
        length, max_tokens, events_read = plan
        ids = [3 + (index * length) % 200 for index in range(length)]
        options = {"max_tokens": max_tokens, "seed": 1}
        with mesh.client.generate(ids, **options) as events:
            for _, _ in zip(range(events_read), events, strict=False):
                pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, plans))
    mesh.wait(lambda: all_blocks_free(mesh), "every block to be free", 10)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, InvalidRequestError, "empty"),
        ([], {}, InvalidRequestError, "empty"),
        ([10**6], {}, InvalidRequestError, "1000000"),
        (PROMPT, {"temperature": -1.0}, InvalidRequestError, "temperature"),
        (PROMPT, {"temperature": float("nan")}, InvalidRequestError, "temperature"),
        (PROMPT, {"top_p": 2.0}, InvalidRequestError, "top_p"),
        (PROMPT, {"max_tokens": 0}, InvalidRequestError, "max_tokens"),
        (PROMPT, {"logprobs": 21}, InvalidRequestError, "top_logprobs"),
        (PROMPT, {"stop": [""]}, InvalidRequestError, "stop"),
        (PROMPT, {"logit_bias": {10**6: 1.0}}, InvalidRequestError, "logit_bias"),
        (PROMPT, {"model": "nowhere"}, UnknownModelError, "nowhere"),
        (PROMPT, {"model": "/etc/passwd"}, InvalidRequestError, "outside the model directories"),
        (PROMPT, {"model": "../../x.gguf"}, InvalidRequestError, "outside the model directories"),
        ([5] * 600, {}, InvalidRequestError, r"600.*512"),
        ("x" * 10_000_000, {}, InvalidRequestError, "512"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_requests_are_refused_with_a_sentence(mesh: Mesh, prompt, options, error, message):
    options = {"max_tokens": 4} | options
    with pytest.raises(error, match=message):
        list(mesh.client.generate(prompt, timeout_s=60, **options))


def test_bad_dialogues_are_refused(mesh: Mesh):
    with pytest.raises(InvalidRequestError, match=r"role.*wizard"):
        list(mesh.client.chat([{"role": "wizard", "content": "x"}]))
    with pytest.raises(InvalidRequestError, match="empty"):
        list(mesh.client.chat([]))


def test_a_load_while_requests_run_is_refused_unless_forced(mesh: Mesh):
    with mesh.client.generate(PROMPT, ignore_eos=True) as events:
        next(iter(events))
        with pytest.raises(NotReadyError, match="running"):
            mesh.client.unload_model()


def test_a_full_queue_says_so(tmp_path, tiny_model):
    with Mesh(tmp_path, tiny_model, 1, "--max-sequences", "1", "--max-waiting", "1") as small:
        streams = [small.client.generate(PROMPT, ignore_eos=True) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(OutOfCapacityError, match="queue is full"):
            list(small.client.generate(PROMPT))
        for stream in streams:
            stream.close()
        small.wait(lambda: all_blocks_free(small), "the queue to empty", 5)
        assert len(ask(small.client)[1]) == 24


def test_the_carrier_between_stages_changes_nothing(tmp_path, tiny_model, mesh: Mesh):
    with Mesh(tmp_path, tiny_model, 3, carrier="shm") as shared:
        plan = shared.client.status(timeout_s=5).plan
        assert plan is not None and [window.carrier for window in plan.windows] == ["shm"] * 3
        assert ask(shared.client)[:2] == ask(mesh.client)[:2]


def test_a_prompt_longer_than_a_step_gives_the_same_in_chunks(tmp_path, tiny_model, mesh: Mesh):
    prompt = [3 + (index * 7) % 200 for index in range(300)]
    whole = ask(mesh.client, prompt)[1]
    with Mesh(tmp_path, tiny_model, 1, "--max-step-tokens", "7", "--run-ahead", "1") as chunked:
        assert ask(chunked.client, prompt)[1] == whole


def test_a_reused_prefix_gives_the_same(mesh: Mesh):
    prompt = [3 + (index * 11) % 200 for index in range(200)]
    first = ask(mesh.client, prompt)
    time.sleep(0.1)
    second = ask(mesh.client, prompt)
    assert second[1] == first[1]
    assert second[2].cached_tokens >= 160 > first[2].cached_tokens


def test_every_error_is_one_of_ours(mesh: Mesh):
    with Client("127.0.0.1:9") as nobody, pytest.raises(PipeLLMError, match="cannot be reached"):
        nobody.status(timeout_s=5)
