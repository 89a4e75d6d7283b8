"""Figures of a benchmark against values worked out by hand, and where its prompts come from."""

import csv
import io
import json
import sys
import types
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from dflash_graphs.errors import RequestError
from dflash_runtime import prompts
from dflash_runtime.bench import Comparison, average, compare, peak_memory, pooled, sweep, warm_up
from dflash_runtime.charts import chart
from dflash_runtime.cli.bench_report import Report, report_csv, report_json, report_lines
from dflash_runtime.device import Settings
from dflash_runtime.generation import GenerationConfig, Result, Timings
from dflash_runtime.loop import Round
from dflash_runtime.prompts import BUILT_IN, Dataset, Encoder, Sample, load_dataset
from dflash_runtime.simulate import predict
from dflash_runtime.tokenizer import Tokenizer

# figures


def _result(tokens: int, decode: float, first: float, rounds: list[tuple[int, int, int]] = ()) -> Result:  # type: ignore[assignment]
    return Result(
        prompt_tokens=10,
        token_ids=list(range(tokens)),
        rounds=[Round(drafted, accepted, (0,) * emitted, 0.0, 0.0) for drafted, accepted, emitted in rounds],
        timings=Timings(first_token=first, decode=decode),
    )


FIRST = Comparison("a", "1", _result(5, 4.0, 0.2), _result(5, 1.0, 0.3, [(3, 2, 3), (1, 0, 1)]))
SECOND = Comparison("a", "2", _result(9, 8.0, 0.4), _result(9, 5.0, 0.5, [(3, 3, 4), (3, 1, 2), (0, 0, 1), (0, 0, 1)]))


def test_pooled_figures_by_hand() -> None:
    found = pooled([FIRST, SECOND], positions=4)
    assert (found.requests, found.prompt_tokens, found.tokens, found.differing) == (2, 20, 14, 0)
    assert found.plain_tokens_per_second == 1.0 and found.tokens_per_second == 2.0
    assert found.speedup == 2.0 and found.cost_saved == 0.5
    assert found.plain_tpot == 1.0 and found.tpot == 0.5
    assert found.plain_ttft == pytest.approx(0.3) and found.ttft == pytest.approx(0.4)
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (4, 10, 6)
    assert found.acceptance_rate == 0.6 and found.acceptance_length == 2.5
    assert found.survival == (0.75, 0.5, 0.25, 0.0)
    assert found.conditional_acceptance == (0.75, pytest.approx(2 / 3), 0.5, 0.0)


def test_average_adds_counts_and_means_the_rest() -> None:
    parts = [pooled([FIRST], 2), pooled([SECOND], 2)]
    found = average(parts)
    assert (found.requests, found.drafts, found.accepted_tokens) == (2, 4, 6)
    assert parts[0].speedup == 4.0 and parts[1].speedup == 1.6 and found.speedup == pytest.approx(2.8)
    assert found.survival == (0.75, 0.5)
    assert average(parts[:1]) == parts[0]


def test_requests_of_one_token_have_no_rate() -> None:
    single = Comparison("a", "1", _result(1, 0.0, 0.1), _result(1, 0.0, 0.1))
    found = pooled([single], 3)
    assert found.speedup == found.cost_saved == found.tokens_per_second == found.acceptance_rate == 0.0
    assert found.acceptance_length == 1.0 and found.survival == (0.0, 0.0, 0.0)


def test_other_texts_are_counted() -> None:
    other = Comparison("a", "3", FIRST.plain, replace(FIRST.drafted, token_ids=[9] * 5))
    assert pooled([FIRST, other], 3).differing == 1


def test_peak_memory_is_plausible() -> None:
    peak = peak_memory()
    assert sys.platform == "win32" or (peak is not None and 20 << 20 < peak < 1 << 40)


# runs


class _Engine:
    """Answers every prompt with its length; remembers what was asked, in which order, and on what context."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], bool]] = []
        self.cleared = 0
        self.context = types.SimpleNamespace(clear=self._clear)

    def _clear(self) -> None:
        self.cleared += 1

    def generate(self, prompt: list[int], config: GenerationConfig) -> Result:
        self.asked.append((prompt, config.draft))
        return Result(token_ids=[1, 2], text=f"answer {len(prompt)}", timings=Timings(decode=0.5))


class _Letters:
    """An encoder whose tokens are characters."""

    def encode(self, sample: Sample, answers: tuple[str, ...] = ()) -> list[int]:
        return [ord(letter) for text in (*sample.turns[: len(answers) + 1], *answers) for letter in text]


def _compare(engine: Any, samples: list[Sample]) -> list[Comparison]:
    encoder: Any = _Letters()
    return list(compare(engine, Dataset("set", tuple(samples)), encoder, GenerationConfig()))


def test_both_ways_alternate_each_from_nothing_and_turns_follow_the_answers() -> None:
    engine = _Engine()
    found = _compare(engine, [Sample("x", ("ab",)), Sample("y", ("c", "def"))])
    assert [one.request for one in found] == ["x", "y/1", "y/2"]
    assert [draft for _, draft in engine.asked] == [False, True, True, False, False, True]
    lengths = [len(prompt) for prompt, _ in engine.asked]
    assert lengths == [2, 2, 1, 1, 4 + len("answer 1"), 4 + len("answer 1")]
    assert engine.cleared == 6


def test_warm_up_and_sweep() -> None:
    engine, encoder = _Engine(), _Letters()
    warm_up(engine, Dataset("set", (Sample("x", ("ab",)),)), encoder)  # type: ignore[arg-type]
    assert [draft for _, draft in engine.asked] == [False, True]
    configs = [GenerationConfig(draft=False), GenerationConfig(block_size=4)]
    assert sweep(engine, [[1], [2]], configs) == [2.0, 2.0]  # type: ignore[arg-type]
    assert [prompt for prompt, _ in engine.asked[2:]] == [[1], [1], [2], [2]]


# prompts


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [{"prompt": "def f("}, {"id": "q7", "turns": ["one", "two"]}, {"question_id": 81, "turns": ["three\u2028"]}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    found = load_dataset(str(path))
    assert found.name == "some"
    assert found.samples == (
        Sample("1", ("def f(",), True),
        Sample("q7", ("one", "two")),
        Sample("81", ("three\u2028",)),
    )
    assert load_dataset(str(path), 1).samples == found.samples[:1]
    assert found.sha256 != load_dataset(str(path), 1).sha256 and len(found.sha256) == 64


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"turns": []}', '{"turns": "one"}', '{"turns": [1]}', '{"prompt": 1}']
)
def test_malformed_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(RequestError, match=r"bad.jsonl, line 2"):
        load_dataset(str(path))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a file nor one of gsm8k, humaneval, mt-bench"):
        load_dataset("gsm9k")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no prompts"):
        load_dataset(str(tmp_path / "empty.jsonl"))


def test_spread_takes_from_all_over() -> None:
    samples = tuple(Sample(str(i), ("",)) for i in range(10))
    assert [sample.name for sample in Dataset("", samples).spread(4).samples] == ["0", "2", "5", "7"]
    assert Dataset("", samples).spread(20).samples == samples


def test_the_hub_is_asked_for_the_published_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(repository: str, file: str, repo_type: str) -> str:
        asked.append((repository, repo_type))
        path = tmp_path / Path(file).name
        path.write_text(json.dumps({"question_id": 81, "prompt": ["one", "two"]}))
        return str(path)

    hub = types.SimpleNamespace(hf_hub_download=download)
    rows = [{"question": "How many?", "prompt": "def f():"}]
    table = types.SimpleNamespace(to_pylist=lambda: rows)
    parquet = types.SimpleNamespace(read_table=lambda path: table)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=parquet))  # type: ignore[arg-type]
    assert load_dataset("mt-bench").samples == (Sample("mt-bench-0", ("one", "two")),)
    assert load_dataset("gsm8k").samples[0].turns[0].startswith("How many?\nPlease reason step by step")
    assert "```python\ndef f():\n```" in load_dataset("humaneval").samples[0].turns[0]
    repositories = ["HuggingFaceH4/mt_bench_prompts", "openai/gsm8k", "openai/openai_humaneval"]
    assert asked == [(repository, "dataset") for repository in repositories]


def test_without_the_hub_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: str, **options: str) -> str:
        raise OSError("no route to host")

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"pass a JSONL file. no route to host"):
        load_dataset("gsm8k")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RequestError, match=r"pip install 'dflash-openvino\[datasets\]'"):
        load_dataset("gsm8k")


def test_the_hub_sets_are_named_as_in_the_help() -> None:
    assert list(prompts._HUB) == ["gsm8k", "humaneval", "mt-bench"]


def test_encoding_with_and_without_a_chat_template(pair_folder: Path, tmp_path: Path) -> None:
    folder = pair_folder / "target"
    tokenizer = Tokenizer(folder)
    talk = Sample("x", ("What is a set?", "And a list?"))
    with_template, plain = Encoder(folder, tokenizer), Encoder(tmp_path, tokenizer)
    assert plain.encode(talk) == tokenizer.encode("What is a set?")
    assert plain.encode(talk, ["A bag."]) == tokenizer.encode("What is a set?\n\nA bag.\n\nAnd a list?")
    rendered = tokenizer.decode(with_template.encode(talk, ["A bag."]), skip_special_tokens=False)
    assert [rendered.count(text) for text in ("What is a set?", "A bag.", "And a list?")] == [1, 1, 1]
    assert rendered.index("What is") < rendered.index("A bag") < rendered.index("And a list") and "user" in rendered
    text = load_dataset(str(BUILT_IN), 1).samples[0]
    assert with_template.encode(text) == tokenizer.encode(text.turns[0])


# reports


@pytest.fixture
def report(tmp_path: Path) -> Report:
    settings = Settings(precision="f32", kv_precision="f32", quantization_group=0, threads=2)
    models = types.SimpleNamespace(settings=settings, drafting="dflash")
    engine: Any = types.SimpleNamespace(models=models, is_exact=True, bundle=types.SimpleNamespace(folder=tmp_path))
    found = [FIRST, SECOND, replace(FIRST, dataset="b", request="x")]
    costs = ([1.0, 1.0, 1.1, 1.2], [0.0, 0.3, 0.3, 0.3])
    return Report(engine, GenerationConfig(max_new_tokens=9), False, found, costs, 5 << 20, is_complete=True)


def test_tables_have_a_row_for_every_data_set_and_the_average(report: Report) -> None:
    lines = "\n".join(report_lines(report)).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("a ", "b ", "average "))] == ["a", "b", "average"] * 4
    assert "peak memory 5 MiB" in lines and "9 new tokens at most, greedy, adaptive width, thinking off" in lines
    speed = next(line for line in lines if line.startswith("a "))
    assert speed.split()[1:] == ["2", "14", "1.0", "2.0", "2.00x", "50.0%", "300.0", "400.0", "1000.0", "500.0"]


def test_json_has_pooled_and_per_request_figures(report: Report) -> None:
    found = json.loads(report_json(report))
    assert found["datasets"]["a"]["pooled"] == json.loads(json.dumps(asdict(report.by_dataset["a"])))
    assert [one["request"] for one in found["datasets"]["a"]["requests"]] == ["1", "2"]
    assert found["datasets"]["a"]["mean_of_requests"]["speedup"] == pytest.approx(2.8)
    assert found["average"]["requests"] == 3 and found["is_complete"] and found["peak_memory"] == 5 << 20
    assert len(found["widths"]) == 4 and found["best_width"] == 4


def test_csv_has_a_row_for_every_request(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert [(row["dataset"], row["request"]) for row in rows] == [("a", "1"), ("a", "2"), ("b", "x")]
    assert float(rows[0]["speedup"]) == 4.0 and rows[1]["survival"].split() == ["1.0", "0.5", "0.5"]


@pytest.mark.parametrize("speedups", [{}, {"gsm8k": 2.0, "<odd> & name": 0.4}])
def test_charts_are_well_formed_svg(speedups: dict[str, float]) -> None:
    widths = predict([0.8, 0.4], [1.0, 1.0, 1.2], [0.0, 0.2, 0.2])
    text = chart({"gsm8k": [0.8, 0.4]}, widths, speedups)
    root = ElementTree.fromstring(text)
    labels = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(speedups) <= set(labels) and "1.57x at 3" in labels
    assert ("Speed-up over plain decoding" in labels) == bool(speedups)
