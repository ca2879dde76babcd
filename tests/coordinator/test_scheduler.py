"""The scheduler's rules one by one, and a state machine that drives it against a strict simulated mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from common.errors import ConfigError, OutOfCapacityError, PipeLLMError
from coordinator.scheduler import Scheduler, SchedulerConfig
from coordinator.sequence import Sequence
from protos import stage_pb2
from tests.coordinator.mesh_simulator import Driver, continuation

CONFIG = SchedulerConfig(
    num_blocks=64,
    block_size=4,
    num_groups=1,
    num_stages=1,
    max_step_tokens=16,
    max_sequences=8,
    max_waiting=8,
    context_length=64,
    run_ahead=8,
    repeat=4,
)


def rows(step: stage_pb2.Step) -> list[tuple[int, int, int]]:
    return [(item.sequence_id, item.start_position, item.num_tokens) for item in step.items]


# --- steps ------------------------------------------------------------------------------------------------


def test_first_step_carries_all_a_stage_must_know() -> None:
    driver = Driver(CONFIG)
    sampling = stage_pb2.ResolvedSampling(temperature=0.5, seed=9)
    driver.scheduler.add(Sequence(1, [1, 2, 3, 4, 5], sampling, 3, logprobs=True, top_logprobs=2))
    step = driver.schedule(0)
    assert step is not None
    (item,) = step.items
    assert list(item.token_ids) == [1, 2, 3, 4, 5]
    assert list(item.sample_positions) == [4]
    assert len(item.new_blocks) == 2
    assert item.start.sampling == sampling
    assert item.start.logprobs and item.start.top_logprobs == 2
    assert (step.step_id, step.repeat) == (1, 1)


def test_decode_runs_ahead_of_the_results_in_repeated_steps() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 40)
    prompt, first, *rest = driver.schedule_all()
    assert rows(prompt) == [(1, 0, 3)]
    assert rows(first) == [(1, 3, 1)]
    assert first.items[0].from_ring
    assert [step.repeat for step in (first, *rest)] == [4]  # the prompt's draw is in flight too
    driver.run_all()
    driver.deliver_all()
    assert [step.repeat for step in driver.schedule_all()] == [4, 4]
    driver.drain()


def test_run_ahead_waits_until_a_whole_repeat_fits() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 40)
    driver.schedule_all()
    driver.mesh.run(0, 0)
    driver.deliver_all()  # 4 of 8 in flight
    assert [step.repeat for step in driver.schedule_all()] == [4]
    driver.mesh.run(0, 0)
    driver.deliver_all()  # 7 in flight: a step of one iteration would end all repeating
    assert driver.schedule_all() == []
    driver.drain()


def test_never_issues_past_max_tokens_or_the_context() -> None:
    for max_tokens, length in ((1, 4), (6, 9), (1000, 64)):
        driver = Driver(CONFIG)
        sequence = driver.add([1, 2, 3], max_tokens)
        driver.drain()
        assert len(sequence.tokens) == sequence.max_length == length
        last = max(
            item.start_position + item.num_tokens + step.repeat - 1
            for step in driver.mesh.steps.values()
            for item in step.items
        )
        assert last == length - 1  # the last token is drawn and never computed


def test_long_prompt_is_cut_into_chunks_beside_running_decodes() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 30)
    driver.go_round()
    driver.add(list(range(5)) * 8, 5)
    first, second = driver.schedule_all()
    assert rows(first) == [(1, 7, 1), (2, 0, 15)]
    assert rows(second) == [(1, 8, 1), (2, 15, 15)]
    assert not first.items[1].sample_positions
    driver.run_all()
    driver.deliver_all()
    third, *_ = driver.schedule_all()
    assert rows(third) == [(1, 9, 1), (2, 30, 10)]
    assert list(third.items[1].sample_positions) == [39]
    driver.drain()


def test_prompts_fill_one_step_together() -> None:
    driver = Driver(CONFIG)
    for length in (5, 6, 7):
        driver.add([length] * length, 2)
    assert [rows(step) for step in driver.schedule_all()][:2] == [
        [(1, 0, 5), (2, 0, 6), (3, 0, 5)],
        [(1, 5, 1), (2, 6, 1), (3, 5, 2)],
    ]
    driver.drain()


def test_repeat_only_without_prompts() -> None:
    driver = Driver(replace(CONFIG, max_step_tokens=4))
    driver.add([1, 2], 30)
    driver.add([3] * 20, 3)
    while not driver.scheduler.is_idle:
        for step in driver.schedule_all():
            if any(not item.from_ring for item in step.items):
                assert step.repeat == 1
        driver.run_all()
        driver.deliver_all()
    assert any(step.repeat == 4 for step in driver.mesh.steps.values())


def test_steps_may_be_smaller_than_the_number_of_sequences_allowed() -> None:
    driver = Driver(replace(CONFIG, max_step_tokens=1))
    for seed in range(4):
        driver.add([seed, 1, 2, 3, 4], 3)
    driver.drain()


def test_groups_are_balanced() -> None:
    driver = Driver(replace(CONFIG, num_groups=3, num_stages=3))
    for seed in range(7):
        driver.add([seed % 7] * 4, 20)
    driver.schedule_all()
    groups = [sequence.residency.group for sequence in driver.requests.values() if sequence.residency]
    assert sorted(groups.count(group) for group in range(3)) == [2, 2, 3]
    driver.drain()


def test_prompt_chunks_in_flight_fill_the_ring_and_no_more() -> None:
    driver = Driver(replace(CONFIG, num_stages=2))
    driver.add([1] * 60, 2)
    assert len(driver.schedule_all()) == 3
    driver.drain()


# --- steps by time ----------------------------------------------------------------------------------------

BY_TIME = replace(CONFIG, num_blocks=256, context_length=1024, run_ahead=0, repeat=0)


def repeats(driver: Driver) -> list[int]:
    return [step.repeat for step in driver.mesh.steps.values() if step.items]


@pytest.mark.parametrize(
    ("forward_s", "repeat"),
    [(0.0001, 64), (0.0011, 23), (0.004, 8), (0.009, 5), (0.02, 2), (0.03, 1), (1.0, 1)],
)
def test_a_step_holds_as_many_iterations_as_fit_its_time(forward_s: float, repeat: int) -> None:
    driver = Driver(BY_TIME, forward_s)
    driver.add([1, 2, 3], 600)
    driver.stream(14)
    assert repeats(driver)[-1] == repeat
    driver.drain()


def test_an_answer_begins_with_small_steps_however_fast_the_mesh_is() -> None:
    driver = Driver(BY_TIME, 0.0004)
    for _ in range(2):
        driver.add([1, 2, 3], 300)
        driver.drain()
    again = repeats(driver)[len(repeats(driver)) // 2 :]
    assert again[:7] == [1, 1, 2, 4, 8, 16, 32]


def test_two_steps_are_in_flight_whatever_their_size() -> None:
    driver = Driver(BY_TIME)
    driver.add([1, 2, 3], 600)
    driver.stream(20)
    for _ in range(7):
        driver.mesh.run(0, 0)
        driver.deliver_all()
        assert driver.schedule_all() == []
    driver.mesh.run(0, 0)
    driver.deliver_all()
    assert [step.repeat for step in driver.schedule_all()] == [8]
    driver.drain()


def test_little_is_in_flight_at_first_so_that_others_who_come_then_need_not_wait() -> None:
    driver = Driver(BY_TIME, 0.00161)
    driver.add([1, 2, 3], 300)
    driver.drain()
    driver.add([4, 5, 6], 300)
    assert [step.repeat for step in driver.schedule_all() if step.items] == [1, 1, 2, 4]  # 13 of 25 ms
    driver.drain()


def test_steps_shrink_within_a_few_when_iterations_become_slow() -> None:
    driver = Driver(BY_TIME, 0.00101)
    driver.add([1, 2, 3], 900)
    driver.stream(20)
    assert repeats(driver)[-1] == 25
    driver.mesh.forward_s = 0.012
    driver.stream(8)
    assert repeats(driver)[-1] == 4
    driver.drain()


def test_a_prompt_joins_behind_what_is_in_flight() -> None:
    driver = Driver(BY_TIME)
    driver.add([1, 2, 3], 600)
    driver.stream(20)
    driver.add([4, 5, 6], 600)
    (step,) = driver.schedule_all()[:1]
    assert [item.num_tokens for item in step.items] == [1, 3]
    driver.drain()


def test_prompts_do_not_count_as_time_of_decoding() -> None:
    driver = Driver(BY_TIME)
    driver.add([1, 2, 3], 300)
    driver.stream(20)
    driver.add([1] * 50, 1)
    while driver.requests[2].num_generated == 0:
        driver.schedule_all()
        step_id, _ = driver.mesh.stages[0].queues[0][0]
        prompts = any(not item.from_ring for item in driver.mesh.steps[step_id].items)
        driver.mesh.forward_s = 30.0 if prompts else 0.004
        driver.mesh.run(0, 0)
        driver.deliver_all()
    driver.schedule_all()
    assert repeats(driver)[-1] == 8
    driver.drain()


def test_where_blocks_run_out_steps_shrink_before_a_sequence_gives_way() -> None:
    driver = Driver(replace(BY_TIME, num_blocks=20), 0.0001)
    driver.add([1, 2, 3], 60)
    driver.drain()
    driver.add([1, 2, 3], 30)
    driver.add([4, 5, 6], 40)
    driver.drain()
    assert driver.num_preemptions == 0


# --- ends -------------------------------------------------------------------------------------------------


def test_results_after_the_end_are_dropped() -> None:
    driver = Driver(CONFIG)
    sequence = driver.add([1, 2, 3], 30)
    driver.schedule_all()
    driver.mesh.run(0, 0)
    driver.mesh.run(0, 0)
    driver.deliver(0)
    driver.finish(1)
    driver.run_all()
    driver.deliver_all()
    assert sequence.tokens[3:] == continuation([1, 2, 3], 1)
    driver.drain()


def test_free_follows_alone_when_the_mesh_is_idle() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 1)
    driver.go_round()
    assert driver.scheduler.num_running == 0
    assert not driver.scheduler.is_idle
    assert driver.scheduler.num_free_blocks == 63
    (step,) = driver.schedule_all()
    assert list(step.freed_sequence_ids) == [1]
    assert not step.items
    driver.deliver_all()
    assert driver.scheduler.is_idle
    assert driver.scheduler.num_free_blocks == 64


def test_a_stage_may_skip_what_is_left_of_a_freed_sequence() -> None:
    driver = Driver(BY_TIME, 0.001, skips=True)
    driver.add([1, 2, 3], 600)
    driver.stream(20)
    for _ in range(5):  # into a step
        driver.mesh.run(0, 0)
    driver.deliver_all()
    known = driver.requests[1].num_generated
    driver.finish(1)
    driver.schedule_all()
    driver.run_all()
    driver.deliver_all()
    assert driver.mesh.num_skipped == 2
    assert driver.scheduler.is_idle
    assert driver.requests[1].num_generated == known
    again = driver.add(driver.requests[1].tokens, 5)  # finds what was computed, not what was skipped
    driver.stream(5)
    assert 0 < again.cached_tokens < len(driver.requests[1].tokens)
    driver.drain()


def test_chunks_may_be_skipped_and_are_not_found_then() -> None:
    driver = Driver(replace(CONFIG, num_stages=1), skips=True)
    driver.add([1] * 40, 5)
    driver.schedule_all()
    driver.mesh.run(0, 0)
    driver.deliver_all()
    driver.finish(1)
    driver.go_round()
    assert driver.mesh.num_skipped == 1
    driver.add([1] * 40, 5)
    driver.drain()
    assert driver.requests[2].cached_tokens == 16


def test_blocks_come_back_only_when_all_stages_acknowledged_all_steps() -> None:
    driver = Driver(replace(CONFIG, num_stages=2))
    driver.add([1, 2, 3], 30)
    driver.schedule_all()
    driver.finish(1)
    driver.schedule_all()
    for index in range(2):  # both have acknowledged the free, which computes nothing, at once
        driver.deliver(index)
    assert driver.scheduler.num_free_blocks < 64
    driver.run_all()
    while driver.mesh.stages[0].outbox:
        driver.deliver(0)
    assert driver.scheduler.num_free_blocks < 64
    driver.deliver_all()
    assert driver.scheduler.num_free_blocks == 64


def test_cancel_while_waiting_leaves_no_trace() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 5)
    driver.finish(1)
    assert driver.schedule_all() == []
    assert driver.scheduler.is_idle
    driver.finish(1)  # and once more, as a vanished client and a deadline may both say so


# --- prefix reuse -----------------------------------------------------------------------------------------


def test_computed_prefix_is_reused_and_the_last_token_computed() -> None:
    driver = Driver(CONFIG)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    driver.add(prompt, 2)
    driver.drain()
    again = driver.add(prompt, 2)
    (step, *_) = driver.schedule_all()
    assert rows(step) == [(2, 4, 4)]  # not 8: something must be computed to draw from
    assert list(step.items[0].start.prior_token_ids) == prompt[:4]
    assert again.cached_tokens == 4
    driver.drain()
    longer = driver.add([*prompt, 6], 2)
    driver.drain()
    assert longer.cached_tokens == 8


def test_an_answer_is_reused_by_the_next_turn_of_a_dialogue() -> None:
    driver = Driver(CONFIG)
    first = driver.add([1, 2, 3], 10)
    driver.drain()
    second = driver.add([*first.tokens, 5, 5], 4)
    driver.drain()
    assert second.cached_tokens == 12  # of 13: the last drawn token was never computed


def test_uncomputed_blocks_are_not_reused() -> None:
    driver = Driver(CONFIG)
    driver.add([1] * 9, 5)
    driver.add([1] * 9, 5)
    driver.schedule_all()
    assert [sequence.cached_tokens for sequence in driver.requests.values()] == [0, 0]
    driver.drain()


def test_of_a_prompt_in_work_only_the_computed_chunks_are_reused() -> None:
    driver = Driver(CONFIG)
    prompt = [1] * 40
    driver.add(prompt, 5)
    first, _ = driver.schedule_all()
    driver.mesh.run(0, 0)
    driver.deliver_all()
    driver.add(prompt, 5)
    driver.schedule_all()
    assert driver.requests[2].cached_tokens == first.items[0].num_tokens == 16
    driver.drain()


# --- capacity ---------------------------------------------------------------------------------------------


def test_full_queue_is_refused_with_both_numbers() -> None:
    driver = Driver(replace(CONFIG, max_sequences=1, max_waiting=2))
    for _ in range(3):
        driver.add([1, 2], 2)
    with pytest.raises(OutOfCapacityError, match="3 requests run or wait, at most 3"):
        driver.add([1, 2], 2)
    driver.drain()
    driver.add([1, 2], 2)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler = Scheduler(replace(CONFIG, num_blocks=4))
    sampling = stage_pb2.ResolvedSampling()
    with pytest.raises(OutOfCapacityError, match="18 tokens .* need 5 KV blocks, there are 4"):
        scheduler.add(Sequence(1, [1] * 10, sampling, 8))
    with pytest.raises(OutOfCapacityError, match="64 tokens leaves no room .* 64 tokens"):
        scheduler.add(Sequence(1, [1] * 64, sampling, 8))
    scheduler.add(Sequence(1, [1] * 10, sampling, 7))


def test_out_of_blocks_the_youngest_gives_way_and_loses_nothing() -> None:
    driver = Driver(replace(CONFIG, num_blocks=8))
    old, young = driver.add([1, 2, 3], 29), driver.add([4, 5, 6], 29)
    driver.drain()
    assert driver.num_preemptions > 0
    assert old.tokens[3:] == continuation([1, 2, 3], 29)
    assert young.tokens[3:] == continuation([4, 5, 6], 29)
    stays = [
        [*item.start.prior_token_ids, *item.token_ids][0]
        for step in driver.mesh.steps.values()
        for item in step.items
        if item.HasField("start")
    ]
    assert stays.count(1) == 1  # the oldest was never sent away
    assert stays.count(4) == 1 + driver.num_preemptions


def test_a_prompt_in_work_may_give_way() -> None:
    driver = Driver(replace(CONFIG, num_blocks=9, max_step_tokens=2, run_ahead=1, repeat=1))
    driver.add([1, 2, 3], 20)
    driver.go_round()
    young = driver.add([4] * 28, 4)
    while driver.num_preemptions == 0 and not driver.scheduler.is_idle:
        driver.go_round()
    assert driver.num_preemptions == 1
    assert young.num_generated == 0
    driver.drain()


def test_no_more_give_way_than_must() -> None:
    driver = Driver(replace(CONFIG, num_blocks=8, run_ahead=1, repeat=1))
    for token in (1, 2, 3):
        driver.add([token, 5, 5], 12)
    while driver.num_preemptions == 0:
        before = {key for key, sequence in driver.requests.items() if sequence.residency}
        driver.schedule(0)
        driver.run_all()
        driver.schedule(0)  # again, before the blocks are back
        assert len(before) - driver.scheduler.num_running <= 1
        driver.deliver_all()
        if driver.scheduler.num_running < 3:
            break
    assert driver.scheduler.num_running == 2
    driver.drain()


def test_kv_of_tokens_never_accepted_is_not_found_under_those_drawn_again() -> None:
    """Recomputed, a near-tie may fall the other way than it did in the stay that was cut short."""
    scheduler = Scheduler(replace(CONFIG, num_blocks=8, num_groups=2, run_ahead=16, repeat=1))
    old, young = (Sequence(key, [key] * 3, stage_pb2.ResolvedSampling(), 29) for key in (1, 2))

    def issue(group: int) -> stage_pb2.Step:
        step = scheduler.schedule(group)
        assert step is not None
        return step

    def answer(step: stage_pb2.Step, token_id: int) -> None:
        result = stage_pb2.StepResult(step_id=step.step_id)
        for item in step.items:
            position = item.start_position + item.num_tokens
            result.tokens.add(sequence_id=item.sequence_id, position=position, token_id=token_id)
        scheduler.on_result(result)

    scheduler.add(old)
    old_steps = [issue(0)]
    scheduler.add(young)
    cut_short = [issue(1)]
    for _ in range(13):  # each now fills 4 of the 8 blocks
        old_steps.append(issue(0))
        cut_short.append(issue(1))
    for step in cut_short[:6]:
        answer(step, 6)
    assert scheduler.schedule(0) is None  # the old one needs a fifth block: the young one gives way
    assert young.residency is None
    scheduler.finish(old.sequence_id)
    old_steps.append(issue(0))
    for step in old_steps[:-1]:
        answer(step, 6)
    for step in old_steps:
        scheduler.on_acknowledged(0, step.step_id)

    second_stay = [issue(1)]
    assert second_stay[0].items[0].num_tokens == 9
    for _ in range(7):
        answer(second_stay[-1], 5)
        second_stay.append(issue(1))
    answer(second_stay[-1], 5)
    assert young.tokens == [2] * 3 + [6] * 6 + [5] * 8
    for step in cut_short + second_stay:
        scheduler.on_acknowledged(0, step.step_id)
    scheduler.finish(young.sequence_id)
    scheduler.add(Sequence(3, young.tokens, stage_pb2.ResolvedSampling(), 1))
    step = issue(0)
    assert step.items[0].start_position == 16
    rejected = [block for step in cut_short for item in step.items for block in item.new_blocks][2:]
    assert not set(rejected) & set(step.items[0].new_blocks[:4])


def test_a_sequence_that_fails_ends_alone_and_leaves_nothing_to_find() -> None:
    driver = Driver(CONFIG)
    scheduler = driver.scheduler
    prompt = [3] * 8  # two full blocks
    broken, sound = driver.add(prompt, 9), driver.add([1, 2], 9)
    driver.schedule_all()
    driver.mesh.run(0, 0)
    result = driver.mesh.deliver(0)
    assert isinstance(result, stage_pb2.StepResult)
    wire_id = result.tokens[0].sequence_id
    failure = stage_pb2.SequenceFailure(sequence_id=wire_id, position=8, reason="not numbers")
    del result.tokens[0]
    assert [sequence for sequence, _ in scheduler.on_result(result)] == [sound]
    assert scheduler.on_failed(failure) is broken
    assert scheduler.on_failed(failure) is None  # what was issued ahead fails too
    driver.finished.add(broken.sequence_id)
    driver.drain()
    again = driver.add(prompt, 1)
    driver.drain()
    assert again.cached_tokens == 0


def test_admission_leaves_room_for_the_running_to_grow() -> None:
    driver = Driver(replace(CONFIG, num_blocks=8))
    driver.add([1] * 16, 4)
    driver.add([2] * 16, 4)
    driver.schedule_all()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 1)
    driver.drain()


def test_first_come_first_admitted() -> None:
    driver = Driver(replace(CONFIG, max_sequences=2, max_waiting=20))
    for seed in range(6):
        driver.add([seed % 7] * (12 - 2 * seed), 6)
    driver.drain()
    started = [sequence.first_step_s for sequence in driver.requests.values()]
    assert started == sorted(started, key=lambda step: -1.0 if step is None else step)
    assert None not in started
    assert started[0] != started[-1]


def test_times_are_of_the_given_clock() -> None:
    now = 1.0
    scheduler = Scheduler(CONFIG, clock=lambda: now)
    sequence = Sequence(1, [1, 2], stage_pb2.ResolvedSampling(), 2)
    scheduler.add(sequence)
    step = scheduler.schedule(0)
    assert step is not None
    assert (sequence.first_step_s, sequence.first_token_s) == (1.0, None)
    for repeat_position in (2, 3):
        result = stage_pb2.StepResult(step_id=repeat_position - 1)
        result.tokens.add(sequence_id=1, position=repeat_position, token_id=5)
        scheduler.schedule(0)
        now += 1.0
        scheduler.on_result(result)
    assert (sequence.first_token_s, sequence.last_token_s) == (2.0, 3.0)


# --- contradictions ---------------------------------------------------------------------------------------


def test_messages_that_contradict_the_books_are_errors() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 1)
    driver.schedule_all()
    with pytest.raises(PipeLLMError, match="acknowledged step 7"):
        driver.scheduler.on_acknowledged(0, 7)
    with pytest.raises(PipeLLMError, match="result came for step 1, repeat 1"):
        driver.scheduler.on_result(stage_pb2.StepResult(step_id=1, repeat=1))
    wrong = stage_pb2.StepResult(step_id=1)
    wrong.tokens.add(sequence_id=1, position=9, token_id=1)
    with pytest.raises(PipeLLMError, match="position 9 of sequence 1, whose next is 3"):
        driver.scheduler.on_result(wrong)
    driver.scheduler.on_acknowledged(0, 1)
    with pytest.raises(PipeLLMError, match="acknowledged step 1"):
        driver.scheduler.on_acknowledged(0, 1)


def test_results_may_not_be_missing_of_a_sequence_that_goes_on() -> None:
    driver = Driver(CONFIG)
    driver.add([1, 2, 3], 5)
    driver.schedule_all()
    with pytest.raises(PipeLLMError, match="step 1 was acknowledged without 1 of its results"):
        driver.scheduler.on_acknowledged(0, 1)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_groups", "num_stages"])
def test_nonsense_configuration_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        replace(CONFIG, **{name: 0})


# --- everything at once -----------------------------------------------------------------------------------

PROMPTS = st.builds(
    lambda shared, tail: [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5][:shared] + tail,
    st.integers(0, 12),
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go, stages and messages lag at random; at the end all must come out right."""

    @initialize(
        stages=st.integers(1, 3),
        groups=st.integers(1, 3),
        block_size=st.integers(1, 4),
        spare_tokens=st.sampled_from([0, 0, 4, 8, 16, 64]),
        max_step_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 6),
        run_ahead=st.integers(0, 8),
        repeat=st.integers(0, 4),
        forward_s=st.sampled_from([0.0, 0.0004, 0.002, 0.008, 0.1]),
        skips=st.booleans(),
    )
    def start(
        self,
        stages: int,
        groups: int,
        block_size: int,
        spare_tokens: int,
        max_step_tokens: int,
        max_sequences: int,
        run_ahead: int,
        repeat: int,
        forward_s: float,
        skips: bool,
    ) -> None:
        context_length = 32
        self.driver = Driver(
            SchedulerConfig(
                num_blocks=-(-(context_length + spare_tokens) // block_size),
                block_size=block_size,
                num_groups=groups,
                num_stages=stages,
                max_step_tokens=max_step_tokens,
                max_sequences=max_sequences,
                max_waiting=4,
                context_length=context_length,
                run_ahead=run_ahead,
                repeat=repeat,
            ),
            forward_s,
            skips,
        )

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), max_tokens=st.integers(1, 24))
    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        scheduler, config = self.driver.scheduler, self.driver.config
        for prompt in prompts:
            present = scheduler.num_running + scheduler.num_waiting
            if present < config.max_sequences + config.max_waiting:
                self.driver.add(prompt, max_tokens)
            else:
                with pytest.raises(OutOfCapacityError):
                    self.driver.add(prompt, max_tokens)

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        self.driver.schedule(data.draw(st.integers(0, self.driver.config.num_groups - 1)))

    @rule()
    def schedule_all(self) -> None:
        self.driver.schedule_all()

    @precondition(lambda self: self.driver.mesh.runnable())
    @rule(data=st.data(), count=st.integers(1, 6))
    def run(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            runnable = self.driver.mesh.runnable()
            if runnable:
                self.driver.mesh.run(*data.draw(st.sampled_from(runnable)))

    @rule(data=st.data(), count=st.integers(1, 6))
    def deliver(self, data: st.DataObject, count: int) -> None:
        stage = data.draw(st.integers(0, self.driver.config.num_stages - 1))
        for _ in range(min(count, len(self.driver.mesh.stages[stage].outbox))):
            self.driver.deliver(stage)

    @rule(times=st.integers(1, 8))
    def go_round(self, times: int) -> None:
        for _ in range(times):
            self.driver.go_round()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.driver.finish(data.draw(st.sampled_from(sorted(self.driver.requests))))

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            event(f"pre-emptions: {min(self.driver.num_preemptions, 3)}")
            event(f"skipped steps: {min(self.driver.mesh.num_skipped, 3)}")
            longest = max((step.repeat for step in self.driver.mesh.steps.values()), default=0)
            event(f"longest step: {longest}")


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
