import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.sampler import SamplingOptions, sample, uniform

PLAIN = SamplingOptions(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0, repeat_last_n=64,
    presence_penalty=0.0, frequency_penalty=0.0, seed=1,
)  # fmt: skip
LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


def draw(options, history=(0,), logits=LOGITS):
    return sample(logits[None], [options], [list(history)])[0]


def counts(options, draws=4000, logits=LOGITS):
    """How often each token comes, over many positions."""
    rows = logits.expand(draws, -1)
    drawn = sample(rows, [options] * draws, [[0] * position for position in range(1, draws + 1)])
    return np.bincount([one.token_id for one in drawn], minlength=len(logits)) / draws


def test_temperature_zero_takes_the_most_likely():
    assert draw(replace(PLAIN, temperature=0.0)).token_id == 3


def test_draws_follow_the_softmax():
    expected = torch.softmax(LOGITS, 0).numpy()
    assert np.abs(counts(PLAIN) - expected).max() < 0.03


def test_temperature_sharpens():
    expected = torch.softmax(LOGITS / 0.5, 0).numpy()
    assert np.abs(counts(replace(PLAIN, temperature=0.5)) - expected).max() < 0.03


def test_top_k_keeps_the_k_most_likely():
    assert set(np.flatnonzero(counts(replace(PLAIN, top_k=2)))) == {2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    # softmax: 3 -> 0.636, 2 -> 0.234, 1 -> 0.086: 0.8 needs the first two.
    assert set(np.flatnonzero(counts(replace(PLAIN, top_p=0.8)))) == {2, 3}
    assert set(np.flatnonzero(counts(replace(PLAIN, top_p=0.0)))) == {3}


def test_min_p_drops_what_is_far_below_the_best():
    # 1 is e^-2 = 0.135 of the best, 0 is e^-3 = 0.0498.
    assert set(np.flatnonzero(counts(replace(PLAIN, min_p=0.1)))) == {1, 2, 3}


def test_typical_p_prefers_tokens_of_typical_surprise():
    # One token of 0.4 among forty of 0.015: the entropy is nearer the surprise of the many.
    logits = torch.log(torch.tensor([0.4] + [0.015] * 40))
    assert counts(replace(PLAIN, typical_p=0.5), logits=logits)[0] == 0


def test_penalties():
    history = [3, 3, 4]
    greedy = replace(PLAIN, temperature=0.0)
    assert draw(replace(greedy, repeat_penalty=2.0), history).token_id == 2  # 3 -> 1.5
    assert draw(replace(greedy, presence_penalty=1.5), history).token_id == 2  # 3 -> 1.5
    assert draw(replace(greedy, frequency_penalty=0.4), history).token_id == 3  # 3 -> 2.2
    assert draw(replace(greedy, frequency_penalty=0.6), history).token_id == 2  # 3 -> 1.8
    assert draw(replace(greedy, repeat_penalty=2.0, repeat_last_n=1), history).token_id == 3
    assert draw(replace(greedy, repeat_penalty=2.0, repeat_last_n=0), history).token_id == 3


def test_a_negative_logit_is_penalised_downwards():
    logits = torch.tensor([-1.0, -1.5])
    assert draw(replace(PLAIN, temperature=0.0, repeat_penalty=2.0), [0], logits).token_id == 1


def test_bias_and_bans():
    greedy = replace(PLAIN, temperature=0.0)
    assert draw(replace(greedy, logit_bias=((0, 100.0),))).token_id == 0
    assert draw(replace(greedy, banned_token_ids=(3, 2))).token_id == 1


def test_logprobs_are_of_the_whole_softmax():
    one = draw(replace(PLAIN, temperature=0.0, logprobs=True, top_logprobs=3))
    expected = torch.log_softmax(LOGITS, 0)
    assert one.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [token for token, _ in one.top] == [3, 2, 1]
    assert one.top[2][1] == pytest.approx(float(expected[1]), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.0, 5.0),
    top_k=st.integers(0, 10),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.0, 1.0),
    values=st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5),
)
def test_a_draw_depends_on_seed_and_position_alone_and_never_fails(values, seed, **options):
    chosen = replace(PLAIN, seed=seed, **options)
    logits = torch.tensor(values)
    alone = draw(chosen, [0, 1], logits)
    in_batch = sample(
        torch.stack([LOGITS, logits, LOGITS]), [PLAIN, chosen, PLAIN], [[0], [0, 1], [0, 1, 2]]
    )[1]
    assert alone == in_batch


def test_uniform_is_uniform():
    values = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    neighbours = np.array([uniform(7, position) for position in range(5000)])
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [(1.0, math.nan), (1.0, math.inf), (-math.inf, -math.inf)])
def test_logits_that_are_not_numbers_give_no_token_and_harm_no_other_row(bad, temperature):
    logits = torch.tensor([[1.0, 2.0], bad, [1.0, 2.0]])
    for options in (replace(PLAIN, temperature=temperature), replace(PLAIN, logprobs=True, top_logprobs=1)):
        before, broken, after = sample(logits, [options] * 3, [[0]] * 3)
        assert "logits are not numbers" in broken.failure
        for one in (before, after):
            assert one == draw(options, [0], logits[0]) and not one.failure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "too_large",
    [
        {"logit_bias": ((1, 3e38), (1, 3e38))},
        {"banned_token_ids": (0, 1, 2, 3, 4)},
        {"frequency_penalty": math.inf, "presence_penalty": -math.inf},
    ],
    ids=["biases", "bans", "penalties"],
)
def test_options_that_leave_no_number_fail_their_own_row(too_large, temperature):
    assert draw(replace(PLAIN, temperature=temperature, **too_large), [3]).failure
