"""A conversation on one engine: each turn computes only what is new, and equals a run from scratch bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_graphs.errors import RequestError
from dflash_runtime import ChatSession, Engine, GenerationConfig, Result, load

CONFIG = GenerationConfig(max_new_tokens=40, ignore_eos=True, logprobs=4)
MARGIN = 31  # tokens before the end of a prompt within which a request with another end resumes


def cold(engine: Engine, ids: list[int], config: GenerationConfig = CONFIG) -> Result:
    engine.context.clear()
    result = engine.generate(ids, config)
    assert result.cached_tokens == 0
    return result


def same(a: Result, b: Result) -> bool:
    return (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def test_a_second_turn_computes_only_what_is_new(engine: Engine, golden: list[dict[str, Any]]) -> None:
    engine.context.clear()
    ids = list(golden[0]["prompt_ids"])
    for turn in (1, 4, 7):
        answer = engine.generate(ids, CONFIG)
        ids += [*answer.token_ids, *golden[turn]["prompt_ids"]]
        warm = engine.generate(ids, replace(CONFIG, max_new_tokens=20))
        # all but the answer's last token, which was emitted and never put in
        assert warm.cached_tokens == len(ids) - len(golden[turn]["prompt_ids"]) - 1
        assert same(warm, cold(engine, ids, replace(CONFIG, max_new_tokens=20)))
        ids += warm.token_ids


def test_the_same_prompt_again_and_one_with_another_end(engine: Engine, golden: list[dict[str, Any]]) -> None:
    history = [*golden[0]["prompt_ids"], *golden[0]["greedy_ids"]]
    first, other = [*history, *golden[3]["prompt_ids"]], [*history, *golden[5]["prompt_ids"]]
    cold(engine, history)
    prompts = (first, first, other, first)
    answers = [engine.generate(ids, CONFIG) for ids in prompts]
    assert answers[1].cached_tokens >= len(first) - MARGIN
    common = next(i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
    assert common >= answers[2].cached_tokens >= len(history) - 1 - MARGIN
    assert all(same(answer, cold(engine, ids)) for answer, ids in zip(answers, prompts, strict=True))


def test_a_turn_after_an_answer_that_was_closed(engine: Engine, golden: list[dict[str, Any]]) -> None:
    engine.context.clear()
    ids, part = golden[2]["prompt_ids"], Result()
    stream = engine.stream(ids, CONFIG, part)
    for _ in range(3):
        next(stream)
    stream.close()
    following = [*ids, *part.token_ids, *golden[4]["prompt_ids"]]
    warm = engine.generate(following, CONFIG)
    assert warm.cached_tokens == len(ids) + len(part.token_ids) - 1
    assert same(warm, cold(engine, following))


def test_plain_and_drafted_turns_mix(engine: Engine, golden: list[dict[str, Any]]) -> None:
    engine.context.clear()
    ids, found = list(golden[1]["prompt_ids"]), []
    for draft in (False, True, False, True):
        found.append(engine.generate(ids, replace(CONFIG, draft=draft)))
        ids += [*found[-1].token_ids, *golden[6]["prompt_ids"]]
    assert found[-1].cached_tokens > 0
    assert same(found[-1], cold(engine, ids[: found[-1].prompt_tokens]))


# chat sessions


def test_session_keeps_the_conversation(engine: Engine) -> None:
    session = engine.chat("Be brief.")
    answer = session.say("What is a set, and when is it better than a list of the same things?", CONFIG)
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    assert session.messages[-1]["content"] == answer.text and session.last is answer
    second = session.say("And a list?", CONFIG)
    ids = engine.encode(session.messages[:-1])
    assert second.prompt_tokens == len(ids) and second.cached_tokens > 0
    assert same(second, cold(engine, ids))
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_options_reach_the_chat_template(engine: Engine) -> None:
    thinking, not_thinking = engine.chat(), engine.chat(enable_thinking=False)
    more = not_thinking.say("Hi", CONFIG).prompt_tokens - thinking.say("Hi", CONFIG).prompt_tokens
    assert more > 0  # the template closes the thought
    closing = replace(CONFIG, template_options={"enable_thinking": False})
    assert thinking.regenerate(closing).prompt_tokens == not_thinking.last.prompt_tokens
    found = engine.generate([{"role": "user", "content": "Hi"}], closing)
    assert same(found, not_thinking.last)
    with pytest.raises(RequestError, match="enable_thinking"):
        engine.generate("Hi", closing)


def test_regenerate_replaces_the_last_answer(engine: Engine) -> None:
    session = engine.chat()
    session.say("What is a set?", CONFIG)
    before = session.say("And a list?", CONFIG)
    again = session.regenerate(CONFIG)
    assert same(before, again) and again.cached_tokens >= again.prompt_tokens - MARGIN
    other = session.regenerate(replace(CONFIG, temperature=1.5, seed=3))
    assert other.token_ids != before.token_ids
    assert len(session.messages) == 4 and session.messages[-1]["content"] == other.text
    with pytest.raises(RequestError, match="no answer"):
        engine.chat().regenerate()


def test_the_last_message_in_other_words(engine: Engine) -> None:
    session = engine.chat("Be brief.")
    first = session.say("What is a set?", CONFIG)
    session.say("And a list?", CONFIG)
    assert session.undo() == "And a list?" and len(session.messages) == 3
    edited = session.say("And a dictionary?", CONFIG)
    assert edited.cached_tokens >= first.prompt_tokens  # the turn before is not computed again
    assert same(edited, cold(engine, engine.encode(session.messages[:-1])))
    session.undo(), session.undo()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    with pytest.raises(RequestError, match="no answer"):
        session.undo()


def test_an_answer_cut_short_stays_as_far_as_it_came(engine: Engine) -> None:
    session = engine.chat()
    stream = session.stream("What is a set?", CONFIG)
    text = next(stream)
    stream.close()
    assert session.messages[-1] == {"role": "assistant", "content": text}
    assert session.say("Go on", CONFIG).finish_reason == "length"


def test_a_refused_message_is_not_kept(small_bundle: Callable[[str], Path]) -> None:
    session = ChatSession(load(small_bundle("f32"), max_context=64))
    for text in ("word " * 100, "hi"):
        with pytest.raises(RequestError, match="exceed the context"):
            session.say(text, GenerationConfig(max_new_tokens=60))
        assert session.messages == []
    session.say("hi", replace(CONFIG, max_new_tokens=8))
    with pytest.raises(RequestError, match="exceed the context"):
        session.regenerate(GenerationConfig(max_new_tokens=60))
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
