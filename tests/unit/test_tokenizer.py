"""The tokenizer: same ids as transformers, streamed text equal to the text decoded at once, stop ids of every file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from dflash_graphs.errors import BundleError, RequestError
from dflash_runtime import tokenizer as module
from dflash_runtime.tokenizer import DetokenizeStream, Tokenizer
from tokenizers import decoders, models, processors

PAIR = Path(module.__file__).parent / "data" / "pair" / "target"
QWEN3_5 = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "qwen3.5"

SAMPLES = (
    "The quick brown fox",
    "I'LL we've don't 'Tis",
    "Grüße, Åse! naïve cafe\u0301 e\u0301\u0302\u0323",
    "Привет, мир",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีครับ ที่นี่",
    "தமிழ் வணக்கம்",
    "שָׁלוֹם עולם",
    "مرحبًا بِالعَالَم",
    "你好，世界。",  # noqa: RUF001
    "こんにちは ガギグ か\u3099",
    "안녕하세요 \u1112\u1161\u11ab",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 1️⃣",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𓀀",  # noqa: RUF001
    "3.14159 1234567890 ١٢٣ Ⅷ ½ ²",
    "line\r\nline\r\n\r\n\tindented\n    four  ",
    "\u00a0\u2003\u200b\ufeff\u00ad",
    "def f(x):\n    return {'a': [1, 2]}  # ok\n",
    "<|im_start|>user\n<|im_end|><|endoftext|>",
    "<think>\n</think> <|im_start",
    "\ufffd lone replacement \ufffd",
    "$$$ ### ... !!! —– «»",  # noqa: RUF001
    "\x00\x01\x7f\x1b[0m",
)


def strings(count: int, seed: int = 5) -> Iterator[str]:
    """Deterministic mixtures: pieces of samples, cut anywhere and joined with varied white space."""
    rng = random.Random(seed)
    yield from ("", " ", *SAMPLES)
    for _ in range(count - len(SAMPLES) - 2):
        pieces = []
        for _ in range(rng.randrange(1, 6)):
            sample = rng.choice(SAMPLES)
            start = rng.randrange(len(sample))
            pieces.append(sample[start : start + rng.randrange(1, 24)])
        yield rng.choice(["", " ", "\n", "  ", "\t"]).join(pieces)


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def words(*names: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return backend


def assert_same_ids(folder: Path, texts: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    ours, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        for special in (True, False):
            ids = reference(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids, special) == reference.decode(ids, skip_special_tokens=special), text


def test_ids_and_text_equal_transformers() -> None:
    assert_same_ids(PAIR, list(strings(300)))


@pytest.mark.shared
def test_ids_and_text_equal_transformers_for_qwen3_5() -> None:
    texts = list(strings(500))
    assert len(set(texts)) > 480
    assert_same_ids(QWEN3_5, texts)


def test_bos_is_what_the_post_processor_says(tmp_path: Path) -> None:
    backend = words("?", "<s>", "a", "b")
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": False}
    folder = write_folder(tmp_path, backend, tokenizer_config=config)
    assert Tokenizer(folder).encode("a b") == [1, 2, 3]
    assert Tokenizer(folder).encode("a b", add_special_tokens=False) == [2, 3]
    assert_same_ids(folder, ["a b", "", "<s> a"])


def test_limits_in_the_file_do_not_cut_or_pad(tmp_path: Path) -> None:
    backend = words("?", "a")
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=8)
    assert Tokenizer(write_folder(tmp_path, backend)).encode("a a a a a") == [1] * 5


@pytest.mark.parametrize(
    ("declaring", "content"),
    [("tokenizer_config", {"tokenizer_class": "Qwen3_5Tokenizer"}), ("config", {"model_type": "qwen3_5"})],
)
def test_qwen3_5_reads_marks_as_letters_whatever_its_file_says(
    tmp_path: Path, declaring: str, content: dict[str, str]
) -> None:
    published = json.loads((PAIR / "tokenizer.json").read_text(encoding="utf-8"))
    split = published["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"[\p{L}\p{M}]+", r"\p{L}+").replace(r"\p{L}\p{M}\p{N}", r"\p{L}\p{N}")
    # A letter, the two bytes of U+0301 in byte-level spelling, and a merge across the border between letter and mark.
    vocabulary = {"x": 0, "Ì": 1, "ģ": 2, "xÌ": 3}
    published["model"] |= {"vocab": vocabulary, "merges": [["x", "Ì"]]}
    published["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(published), encoding="utf-8")
    assert Tokenizer(tmp_path).encode("x\u0301") == [0, 1, 2]
    (tmp_path / f"{declaring}.json").write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer(tmp_path).encode("x\u0301") == [3, 2]


def streamed(stream: DetokenizeStream, ids: list[int], rng: random.Random) -> list[str]:
    parts, start = [], 0
    while start < len(ids):
        size = rng.randrange(6)  # empty blocks too
        parts.append(stream.push(ids[start : start + size]))
        start += size
    return [*parts, stream.flush()]


def assert_streams(folder: Path, texts: list[str]) -> None:
    ours, rng = Tokenizer(folder), random.Random(3)
    for text in texts:
        ids = ours.encode(text)
        for skip in (True, False):
            parts = streamed(ours.stream(skip), ids, rng)
            whole = ours.decode(ids, skip)
            assert "".join(parts) == whole
            assert whole.count("\ufffd") == sum(part.count("\ufffd") for part in parts)


def test_streamed_text_equals_decoded_text_for_random_splits() -> None:
    assert_streams(PAIR, list(strings(200, seed=8)))


@pytest.mark.shared
def test_streamed_text_equals_decoded_text_for_qwen3_5() -> None:
    assert_streams(QWEN3_5, list(strings(200, seed=9)))


def test_streamed_text_equals_decoded_text_for_random_ids() -> None:
    ours, rng = Tokenizer(PAIR), random.Random(4)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(40))]
        assert "".join(streamed(ours.stream(), ids, rng)) == ours.decode(ids)


def test_incomplete_character_waits_and_what_precedes_it_does_not() -> None:
    ours = Tokenizer(PAIR)
    emoji = ours.encode("🦜")
    assert len(emoji) > 1, "the pair spells this character with several tokens"
    stream = ours.stream()
    assert stream.push([*ours.encode("so"), emoji[0]]) == "so"
    assert [stream.push([token]) for token in emoji[1:]] == [""] * (len(emoji) - 2) + ["🦜"]
    assert stream.flush() == ""
    stream.push(emoji[:-1])
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.push(emoji) == "🦜"


def byte_fallback_folder(folder: Path) -> Path:
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁Hello", "▁world", "a", "▁"]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return write_folder(folder, backend)


def test_byte_fallback_vocabulary_streams_and_survives_invalid_bytes(tmp_path: Path) -> None:
    ours, rng = Tokenizer(byte_fallback_folder(tmp_path)), random.Random(6)
    for _ in range(300):
        characters = [[*char.encode()] for char in "日é𐍈A"] + [[256], [257], [258], [259]]
        ids = [token for _ in range(12) for token in rng.choice(characters)]
        assert "".join(streamed(ours.stream(), ids, rng)) == ours.decode(ids)
        streamed(ours.stream(), [rng.randrange(260) for _ in range(20)], rng)


def test_stop_token_ids_of_the_pair() -> None:
    assert Tokenizer(PAIR).stop_token_ids == {4090, 4092}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": [1, 2]}}, {1, 2}),
        ({"config": {"eos_token_id": 3}}, {3}),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 4}}}, {4}),
        ({"tokenizer_config": {"eos_token": "e"}}, {5}),
        ({"tokenizer_config": {"eos_token": {"content": "e", "__type": "AddedToken"}}}, {5}),
        ({"tokenizer_config": {"eos_token": "not a token"}}, set()),
        ({"special_tokens_map": {"eos_token": {"content": "e"}}}, {5}),
        ({"tokenizer_config": {"added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": "e"}}, set()),
    ],
)
def test_stop_token_ids_of_each_file(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    assert Tokenizer(write_folder(tmp_path, words("?", "a", "b", "c", "d", "e"), **files)).stop_token_ids == expected


@pytest.mark.shared
def test_stop_token_ids_of_qwen3_5(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(QWEN3_5, tmp_path / "bundle"))
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 248044}}', encoding="utf-8")
    ours = Tokenizer(folder)
    assert ours.stop_token_ids == {248044, 248046}
    assert ours.vocab_size == 248077
    assert ours.token_to_id("<|im_end|>") == 248046


def test_vocabulary() -> None:
    ours = Tokenizer(PAIR)
    assert ours.vocab_size == 4096
    assert ours.token_to_id("<|mask|>") == 4095
    assert ours.token_to_id("no such token") is None


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        Tokenizer(PAIR).encode("\ud83d")


@pytest.mark.parametrize("content", [None, b"{}", b"not json", b"\xff"])
def test_missing_or_damaged_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_configuration_is_named(tmp_path: Path, content: str) -> None:
    (write_folder(tmp_path, words("?")) / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(BundleError, match=r"generation_config\.json"):
        Tokenizer(tmp_path)
