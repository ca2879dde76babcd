"""How results are gathered into messages on their way to the coordinator."""

from __future__ import annotations

import threading
import time

from common.errors import PipeLLMError
from protos.stage_pb2 import ExecuteResponse, StepResult
from stage.epoch import REPORT_S, Responses


def result(step_id: int, repeat: int, *, last: bool = False) -> ExecuteResponse:
    return ExecuteResponse(
        results=[StepResult(step_id=step_id, repeat=repeat)], acknowledged_steps=[step_id] if last else []
    )


def take(responses: Responses) -> tuple[list[tuple[int, int]], list[int]]:
    message, reason = responses.take()
    assert message is not None and reason is None
    results = [(one.step_id, one.repeat) for one in message.results]
    return results, list(message.acknowledged_steps)


def test_a_first_token_is_sent_at_once() -> None:
    responses = Responses()
    responses.put(result(1, 0, last=True))
    took = time.monotonic()
    assert take(responses) == ([(1, 0)], [1])
    assert time.monotonic() - took < REPORT_S / 2


def test_a_steps_results_go_in_one_message() -> None:
    responses = Responses()
    responses.put(result(1, 0, last=True))
    take(responses)

    def report() -> None:
        for repeat in range(4):
            time.sleep(REPORT_S / 20)
            responses.put(result(2, repeat, last=repeat == 3))

    thread = threading.Thread(target=report)
    thread.start()
    assert take(responses) == ([(2, 0), (2, 1), (2, 2), (2, 3)], [2])
    thread.join()


def test_a_long_step_is_reported_in_parts() -> None:
    responses = Responses()
    responses.put(result(1, 0, last=True))
    take(responses)
    began = time.monotonic()
    responses.put(result(2, 0))
    assert take(responses) == ([(2, 0)], [])
    assert time.monotonic() - began > REPORT_S / 2
    time.sleep(REPORT_S)
    responses.put(result(2, 1))
    began = time.monotonic()
    assert take(responses) == ([(2, 1)], [])  # none has been sent for long: at once
    assert time.monotonic() - began < REPORT_S / 2


def test_what_waits_for_a_busy_reader_goes_together() -> None:
    responses = Responses()
    for step_id in (1, 2):
        responses.put(result(step_id, 0))
        responses.put(result(step_id, 1, last=True))
    assert take(responses) == ([(1, 0), (1, 1), (2, 0), (2, 1)], [1, 2])


def test_the_end_comes_after_what_was_reported_and_its_first_reason_counts() -> None:
    responses = Responses()
    responses.put(result(1, 0))
    responses.end(PipeLLMError("first"))
    responses.end(PipeLLMError("second"))
    message, reason = responses.take()
    assert message == result(1, 0) and str(reason) == "first"
    message, reason = responses.take()
    assert message is None and str(reason) == "first"


def test_the_end_wakes_a_reader_that_waits_for_a_step() -> None:
    responses = Responses()
    responses.put(result(1, 0, last=True))
    take(responses)
    threading.Timer(REPORT_S / 10, responses.end, [PipeLLMError("over")]).start()
    began = time.monotonic()
    assert responses.take()[0] is None
    assert time.monotonic() - began < 10 * REPORT_S
