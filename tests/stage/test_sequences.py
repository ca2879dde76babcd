import pytest
from google.protobuf.json_format import ParseDict

from common.errors import InvalidRequestError
from protos import stage_pb2
from stage.sequences import SequenceTable


def table():
    return SequenceTable(num_blocks=8, block_size=4, max_step_tokens=16, vocab_size=100)


def first_step(**changes):
    item = {
        "sequence_id": 1, "start_position": 0, "num_tokens": 3, "token_ids": [5, 6, 7],
        "sample_positions": [2], "new_blocks": [3], "start": stage_pb2.SequenceStart(),
    }  # fmt: skip
    item.update(changes)
    return stage_pb2.Step(step_id=1, repeat=1, items=[stage_pb2.StepItem(**item)])


def start(**fields):
    return ParseDict(fields, stage_pb2.SequenceStart())


def decode_step(position, step_id=2, repeat=1, **changes):
    item = stage_pb2.StepItem(
        sequence_id=1, start_position=position, num_tokens=1, from_ring=True, sample_positions=[position]
    )
    item.MergeFrom(stage_pb2.StepItem(**changes))
    return stage_pb2.Step(step_id=step_id, repeat=repeat, items=[item])


def test_tokens_and_blocks_are_entered_in_order():
    sequences = table()
    sequences.enter(started := first_step())
    assert sequences.begin(started, needs_tokens=True) == [sequences[1].generation]
    sequences[1].set_tokens(3, [8])
    sequences.enter(decode_step(3))
    sequences[1].set_tokens(4, [9])
    sequences.enter(decode_step(4, step_id=3, repeat=4, new_blocks=[0]))
    assert sequences[1].tokens == [5, 6, 7, 8, 9]
    assert sequences[1].block_table.tolist() == [3, 0]
    assert sequences.blocks_in_use == 2


def test_a_token_may_come_by_ring_and_by_description():
    sequences = table()
    sequences.enter(started := first_step())
    sequences.begin(started, needs_tokens=True)
    sequences[1].set_tokens(3, [8])
    sequences[1].set_tokens(3, [8])
    assert sequences[1].tokens == [5, 6, 7, 8]


def test_a_freed_sequence_stays_until_its_last_step_has_run():
    sequences = table()
    started = first_step()
    sequences.enter(started)
    sequences.enter(stage_pb2.Step(step_id=2, repeat=1, freed_sequence_ids=[1]))
    assert len(sequences) == 1
    with pytest.raises(InvalidRequestError, match="not here"):
        sequences.enter(decode_step(3, step_id=3))
    sequences.step_done(started)
    assert len(sequences) == 0 and sequences.blocks_in_use == 0


def test_reused_prefix_tokens_are_known():
    sequences = table()
    start = stage_pb2.SequenceStart(prior_token_ids=[1, 2, 3, 4])
    started = first_step(start=start, start_position=4, sample_positions=[6], new_blocks=[2, 5])
    sequences.enter(started)
    assert sequences[1].tokens == [1, 2, 3, 4]
    sequences.begin(started, needs_tokens=True)
    assert sequences[1].tokens == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_blocks": [8]}, "block 8 of 8"),
        ({"new_blocks": []}, "0 blocks of 4"),
        ({"num_tokens": 17}, "more than the 16"),
        ({"num_tokens": 0, "token_ids": []}, "0 tokens"),
        ({"token_ids": [1]}, "1 ids for 3 rows"),
        ({"token_ids": [1, 2, 100]}, "token id 100 of 100"),
        ({"sample_positions": [3]}, "not of its tokens"),
        ({"sample_positions": [2, 2]}, "not one after the other"),
        ({"sample_positions": [2, 1]}, "not one after the other"),
        ({"start_position": 1, "sample_positions": [3]}, "starts at 1, 0 is next"),
        ({"new_blocks": [3] * 9}, "a table of 9 blocks"),
        ({"start": start(prior_token_ids=[100])}, "prior tokens: token id 100 of 100"),
        ({"start": start(top_logprobs=21)}, "top_logprobs is 21, at most 20"),
        ({"start": start(sampling={"logit_bias": [{"token_id": 100}]})}, "logit_bias: token id 100"),
        ({"start": start(sampling={"banned_token_ids": [100]})}, "banned tokens: token id 100"),
        ({"start": None}, "not here"),
        ({"from_ring": True}, "only a single sampled row"),
    ],
)
def test_a_step_that_contradicts_the_state_is_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        table().enter(first_step(**changes))


def test_frees_and_repeats_are_checked():
    sequences = table()
    with pytest.raises(InvalidRequestError, match="frees sequence 9"):
        sequences.enter(stage_pb2.Step(step_id=1, repeat=1, freed_sequence_ids=[9]))
    with pytest.raises(InvalidRequestError, match="repeat is 0"):
        sequences.enter(stage_pb2.Step(step_id=2))
    sequences = table()
    sequences.enter(first_step())
    with pytest.raises(InvalidRequestError, match="starts twice"):
        sequences.enter(stage_pb2.Step(step_id=3, repeat=1, items=first_step().items))
    with pytest.raises(InvalidRequestError, match="up to position 7"):
        sequences.enter(decode_step(3, step_id=4, repeat=4))


def test_positions_follow_one_another():
    sequences = table()
    sequences.enter(first_step(new_blocks=[3, 4, 5]))
    with pytest.raises(InvalidRequestError, match="starts at 5, 3 is next"):
        sequences.enter(decode_step(5))
    sequences.enter(decode_step(3, step_id=3, repeat=4))
    with pytest.raises(InvalidRequestError, match="starts at 4, 7 is next"):
        sequences.enter(decode_step(4, step_id=4))
    with pytest.raises(InvalidRequestError, match="cut at 8, it has 7"):
        sequences.enter(decode_step(8, step_id=5, truncate_to=8))
    with pytest.raises(InvalidRequestError, match="no token for position 5 comes"):
        sequences.enter(decode_step(5, step_id=6, truncate_to=5))
    again = {"start": None, "start_position": 5, "sample_positions": [7], "new_blocks": []}
    redone = first_step(**again)
    redone.step_id = 7
    sequences.enter(redone)
    sequences.enter(decode_step(8, step_id=8))


def test_a_cut_counts_from_its_turn_on_and_waits_for_the_tokens_before_it():
    sequences = table()
    started, repeated = first_step(new_blocks=[3, 4, 5]), decode_step(3, repeat=2)
    cut = decode_step(4, step_id=3, truncate_to=4, token_ids=[90])
    cut.items[0].from_ring = False
    for step in (started, repeated, cut):
        sequences.enter(step)
    (first,) = sequences.begin(started, needs_tokens=True)
    assert sequences.begin(repeated, needs_tokens=True) == [first]
    assert sequences.begin(cut, needs_tokens=True) is None
    assert (sequences[1].tokens, sequences[1].generation) == ([5, 6, 7], first)
    sequences[1].set_tokens(3, [8])
    sequences[1].set_tokens(4, [9])
    (second,) = sequences.begin(cut, needs_tokens=True)
    assert (sequences[1].tokens, sequences[1].generation) == ([5, 6, 7, 8, 90], second)
    assert second != first


def test_inside_the_ring_no_drawn_token_is_known_and_a_cut_waits_for_none():
    sequences = table()
    cut = first_step(start=None, start_position=5, sample_positions=[7], new_blocks=[], truncate_to=5)
    cut.step_id = 3
    for step in (first_step(new_blocks=[3, 4, 5]), decode_step(3, repeat=4), cut):
        sequences.enter(step)
        assert sequences.begin(step, needs_tokens=False)
    assert sequences[1].tokens == [5, 6, 7]


def test_a_token_from_the_ring_must_have_been_drawn():
    sequences = table()
    sequences.enter(first_step(sample_positions=[1]))
    with pytest.raises(InvalidRequestError, match="no token for position 3 comes by the ring"):
        sequences.enter(decode_step(3))


def test_step_ids_grow_and_a_step_names_a_sequence_once():
    sequences = table()
    sequences.enter(first_step())
    with pytest.raises(InvalidRequestError, match="came after step 1"):
        sequences.enter(decode_step(3, step_id=1))
    double = decode_step(3, step_id=2)
    double.items.extend(decode_step(4).items)
    with pytest.raises(InvalidRequestError, match="twice"):
        sequences.enter(double)


def test_top_logprobs_of_a_small_vocabulary():
    sequences = SequenceTable(num_blocks=8, block_size=4, max_step_tokens=16, vocab_size=10)
    with pytest.raises(InvalidRequestError, match="at most 10"):
        sequences.enter(first_step(start=start(top_logprobs=11)))
