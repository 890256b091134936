"""async-inputs on the engine: requests that a step passes over go on with their own token.

vLLM does that when the token budget is gone before it comes to a request; here the scheduler is
made to do it by hiding one.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

LENGTH = 16


@pytest.fixture
def passed_over():
    """Makes a scheduler leave out a request every few steps; the list of those left out."""
    with pytest.MonkeyPatch.context() as patch:

        def install(engine, every):
            kind = type(engine.scheduler)
            whole, hidden, steps = kind.schedule, [], iter(range(10**6))

            def schedule(itself, *args, **options):
                running = itself.running
                decoding = [one for one in running if one.num_computed_tokens >= one.num_tokens - 1]
                step = next(steps)
                if step % every or len(decoding) < 2:
                    return whole(itself, *args, **options)
                one = decoding[step // every % len(decoding)]
                place = running.index(one)
                running.remove(one)
                try:
                    return whole(itself, *args, **options)
                finally:
                    itself.running.insert(place, one)
                    hidden.append(one.request_id)

            patch.setattr(kind, "schedule", schedule)
            return hidden

        yield install


def run(engines, words, passed_over, model, asynchronous):
    from tests.emulation.reference import same_up_to_ties

    engine = engines(model=model, asynchronous=asynchronous)
    prompts = [words(60 + n, 20 + 10 * n) for n in range(4)]
    expected = engine.tokens(prompts, length=LENGTH)
    hidden = passed_over(engine, every=3)
    answers = engine.tokens(prompts, length=LENGTH)
    print(f"{model}: {len(hidden)} times a request was passed over")
    assert len(hidden) >= 3
    return [
        n
        for n, prompt in enumerate(prompts)
        if not same_up_to_ties(engine.checkpoint, prompt, expected[n], answers[n])
    ]


@pytest.mark.parametrize("model", ["dense", "hybrid"])
@pytest.mark.red(r"AssertionError: assert \[\d.*\] == \[\]")
def test_passed_over(engines, words, passed_over, model):
    assert run(engines, words, passed_over, model, asynchronous=True) == []


def test_passed_over_by_a_synchronous_scheduler(engines, words, passed_over):
    assert run(engines, words, passed_over, "dense", asynchronous=False) == []
