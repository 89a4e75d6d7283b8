"""Compare engines that run DFlash on a CPU, on the same weights: speed, acceptance length, memory, load time.

Each engine runs in worker processes, a peer with the Python of its own environment. All get the same prompts in turn,
to share the machine's ups and downs; idle ones are stopped. A rate is tokens over the time of the whole greedy
request, prefill included. An engine that is absent or fails is listed with its reason. Linux only.

    python compare_peers.py --target CHECKPOINT --drafter CHECKPOINT --prompts prompts.jsonl --bundle BUNDLE \
        --genai-python VENV/bin/python --genai-target IR --genai-drafter IR --vllm-python VENV/bin/python
"""

import contextlib
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
Loaded = tuple[Callable[[str], Any], Callable[[Any], dict[str, Any]]]  # generate (timed), describe its result (untimed)
HEAD = "from __future__ import annotations\nimport contextlib, json, os, subprocess, sys, time"
# The load functions, `peak_rss_mb` and `serve` are sent to other interpreters as source, so each imports what it needs.


def load_dflash(options: dict[str, Any]) -> Loaded:
    """This project's engine. `target` is the bundle."""
    import dflash_runtime

    engine = dflash_runtime.load(options["target"], threads=options["threads"])
    config = dflash_runtime.GenerationConfig(max_new_tokens=options["max_new_tokens"], draft=bool(options["drafter"]))

    def describe(result: Any) -> dict[str, Any]:
        return {"output": result.token_ids, "tokens": len(result.token_ids), "rounds": len(result.rounds)}

    return lambda prompt: engine.generate(prompt, config), describe


def load_genai(options: dict[str, Any]) -> Loaded:
    """openvino-genai with its default precisions. `target` and `drafter` are exported folders."""
    import openvino_genai as genai

    extra: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
    scheduler, config = genai.SchedulerConfig(), genai.GenerationConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    if "linear_attention" in Path(options["target"], "config.json").read_text():  # hybrid: a state per draft token
        scheduler.num_linear_attention_blocks = (options["draft_tokens"] or 0) + 5
    config.max_new_tokens, config.apply_chat_template = options["max_new_tokens"], False
    config.stop_token_ids = set(options["stop_token_ids"])
    if options["drafter"]:
        extra["draft_model"] = genai.draft_model(options["drafter"], "CPU", **extra)
        config.num_assistant_tokens = options["draft_tokens"]
    pipeline = genai.LLMPipeline(options["target"], "CPU", scheduler_config=scheduler, **extra)

    def describe(result: Any) -> dict[str, Any]:
        tokens, drafting = result.perf_metrics.get_num_generated_tokens(), result.extended_perf_metrics
        durations = drafting.main_model_metrics.raw_metrics.m_durations if drafting else [0.0]  # first: the prefill
        return {"output": result.texts[0], "tokens": tokens, "rounds": len(durations) - 1}

    return lambda prompt: pipeline.generate([prompt], config), describe


def load_vllm(options: dict[str, Any]) -> Loaded:
    """vLLM in bf16, in one process. `target` and `drafter` are checkpoints."""
    os.environ.update(OMP_NUM_THREADS=str(options["threads"]), VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "disable_log_stats": False}
    if options["drafter"]:
        speculation = {"model": options["drafter"], "num_speculative_tokens": options["draft_tokens"]}
        extra["speculative_config"] = {"method": "dflash", **speculation}
    model = LLM(options["target"], dtype="bfloat16", enforce_eager=True, max_model_len=2048, **extra)
    length, stops, seen = options["max_new_tokens"], options["stop_token_ids"], 0
    sampling = SamplingParams(max_tokens=length, temperature=0, stop_token_ids=stops)

    def describe(result: Any) -> dict[str, Any]:
        nonlocal seen
        before, seen = seen, sum(m.value for m in model.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
        ids = list(result[0].outputs[0].token_ids)
        return {"output": ids, "tokens": len(ids), "rounds": seen - before}

    return lambda prompt: model.generate([prompt], sampling, use_tqdm=False), describe


def load_llama(options: dict[str, Any]) -> Loaded:
    """llama.cpp's server on the loopback interface. `target` and `drafter` are GGUF files."""
    from urllib.request import ProxyHandler, build_opener

    threads, port = str(options["threads"]), str(20000 + os.getpid() % 10000)
    command = [options["server"], "-m", options["target"], "-c", "2048", "-np", "1", "-t", threads, "-tb", threads]
    if options["drafter"]:
        command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", str(options["draft_tokens"])]
        command += ["-md", options["drafter"]]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", port])

    def fetch(path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/{path}", data) as response:
            return json.load(response)

    def describe(result: Any) -> dict[str, Any]:
        tokens, peak = result["timings"]["predicted_n"], peak_rss_mb(server.pid)
        rounds = tokens - 1 - result["timings"].get("draft_n_accepted", 0)
        return {"output": result["content"], "tokens": tokens, "rounds": rounds, "peak_rss_mb": peak}

    fixed = {"n_predict": options["max_new_tokens"], "temperature": 0, "cache_prompt": False}
    while server.poll() is None:
        with contextlib.suppress(OSError):  # refused, or 503 while loading
            fetch("health")
            break
        time.sleep(0.1)
    return lambda prompt: fetch("completion", prompt=prompt, **fixed), describe


def peak_rss_mb(process: int | str = "self") -> float:
    """Peak resident memory (VmHWM), file-backed pages included."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM"))


def serve(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Answer JSON lines: options on the first, then a prompt on each."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to stdout as well
    try:
        generate, describe = load(json.loads(sys.stdin.readline()))
        print(json.dumps({"ready": True}), file=replies)
        for line in sys.stdin:
            prompt, start = json.loads(line), time.perf_counter()
            result = generate(prompt)
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "peak_rss_mb": peak_rss_mb(), **describe(result)}), file=replies)
    except Exception as error:
        print(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())[:240]}), file=replies)


@dataclass
class Run:
    """One engine in one mode: its worker, and the replies by repeat and prompt. A `failure` ends it."""

    engine: str
    mode: str
    load: Callable[[dict[str, Any]], Loaded]
    python: Path | None
    options: dict[str, Any]
    failure: str
    load_seconds: float = 0.0
    replies: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    worker: subprocess.Popen[str] | None = None

    def start(self, warm_up: str) -> None:
        source = ["from pathlib import Path", *(inspect.getsource(f) for f in (peak_rss_mb, serve, self.load))]
        command = [str(self.python), "-c", "\n".join([HEAD, *source, f"serve({self.load.__name__})"])]
        pipe, log, begin = subprocess.PIPE, subprocess.DEVNULL, time.perf_counter()
        # A group in this session: if this process dies, the kernel hangs up on the stopped group.
        self.worker = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=log, preexec_fn=os.setpgrp)
        self.exchange(self.options)
        self.load_seconds = time.perf_counter() - begin
        self.exchange(warm_up)

    def exchange(self, message: Any) -> dict[str, Any]:
        """Wake the worker, send a line, stop it again, return its reply: empty, with `failure` set, if it fails."""
        if self.failure or not (self.worker and self.worker.stdin and self.worker.stdout):
            return {}
        os.killpg(self.worker.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            print(json.dumps(message), file=self.worker.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self.worker.stdout.readline() or '{"error": "the worker died"}')
        os.killpg(self.worker.pid, signal.SIGSTOP)
        self.failure = reply.get("error", "")
        return {} if self.failure else reply

    def measure(self, repeat: int, index: int, domain: str, prompt: str) -> None:
        if reply := self.exchange(prompt):
            self.replies[repeat, index] = {"domain": domain, "rate": reply["tokens"] / reply["seconds"], **reply}


def read_prompts(path: Path, per_domain: int) -> list[tuple[str, str]]:
    """Domain and text of the first prompts of each domain; raw code is a domain of its own."""
    chosen: list[tuple[str, str]] = []
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        domain = "raw" if record.get("kind") == "raw" else record["domain"]
        if sum(d == domain for d, _ in chosen) < per_domain:
            chosen.append((domain, record.get("prompt") or record["text"]))
    return chosen


def plan(given: dict[str, Any], threads: int) -> list[Run]:
    """Every engine without, then with its drafter; one that is not there carries the reason."""
    here, server, runs = Path(sys.executable), given["llama_server"] and given["llama_server"].absolute(), []
    files = (given["target"] / name for name in ("generation_config.json", "config.json"))
    stops = next(json.loads(file.read_text())["eos_token_id"] for file in files if file.exists())
    common = {"threads": threads, "max_new_tokens": given["max_new_tokens"], "server": str(server)}
    common["stop_token_ids"] = stops if isinstance(stops, list) else [stops]
    ours = [(f"dflash-openvino, {path.name}", load_dflash, here, path, path, None) for path in given["bundle"]]
    for engine, load, python, target, drafter, count in (
        *ours,
        ("openvino-genai", load_genai, given["genai_python"], given["genai_target"], given["genai_drafter"], "genai"),
        ("vLLM, bf16", load_vllm, given["vllm_python"], given["target"], given["drafter"], "vllm"),
        ("llama.cpp", load_llama, server and here, given["llama_target"], given["llama_drafter"], "llama"),
    ):
        drafting = {"drafter": str(drafter), "draft_tokens": (tokens := given.get(f"{count}_draft_tokens"))}
        for mode, extra in (("plain", dict.fromkeys(drafting)), (f"DFlash {tokens or 'adaptive'}", drafting)):
            needed = [python, target] + [drafter] * (mode != "plain")
            absent = [f"{path} is missing" if path else "not given" for path in needed if not (path and path.exists())]
            options = {"target": str(target), **common, **extra}
            runs.append(Run(engine, mode, load, python, options, absent[0] if absent else ""))
    return runs


def execute(runs: list[Run], prompts: list[tuple[str, str]], repeat: int) -> None:
    """Ask all of `runs` in turn, prompt by prompt; which comes first rotates."""
    try:
        for run in runs:
            run.start(prompts[0][1])
        for index, (domain, text) in enumerate(prompts):
            first = (index + repeat) % len(runs)
            for run in runs[first:] + runs[:first]:
                run.measure(repeat, index, domain, text)
            click.echo(f"repeat {repeat + 1}, prompt {index + 1} of {len(prompts)}", err=True)
    finally:
        for worker in (run.worker for run in runs if run.worker):
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def ratio(run: Run, base: Run) -> str:
    """Median, over the requests that both answered, of the ratio of their rates."""
    ratios = [reply["rate"] / base.replies[key]["rate"] for key, reply in run.replies.items() if key in base.replies]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def table(runs: list[Run]) -> str:
    """Markdown. Medians over prompts and repeats; ratios to the engine's plain decoding and to our engine drafting."""
    domains = list(dict.fromkeys(reply["domain"] for run in runs for reply in run.replies.values()))
    head = ["engine", "mode", "tok/s", "/ plain", "/ ours", *domains, "acceptance length", "as plain", "MB", "load s"]
    lines = [head, ["---"] * len(head)]
    for index, run in enumerate(runs):
        replies, plain = run.replies.values(), runs[index - index % 2]
        if run.failure or not replies:
            lines.append([run.engine, run.mode, f"skipped: {run.failure}", *[""] * (len(head) - 3)])
            continue
        groups = [[r["rate"] for r in replies if domain in ("", r["domain"])] for domain in ("", *domains)]
        total, *each = (f"{statistics.median(group):.1f}" if group else "-" for group in groups)
        length = sum(r["tokens"] - 1 for r in replies) / max(1, sum(r["rounds"] for r in replies))
        same = sum(r["output"] == plain.replies.get(key, {}).get("output") for key, r in run.replies.items())
        drafting = ["", ""] if run is plain else [f"{length:.2f}", f"{same}/{len(replies)}"]
        cost = [f"{max(r['peak_rss_mb'] for r in replies):.0f}", f"{run.load_seconds:.1f}"]
        lines.append([run.engine, run.mode, total, ratio(run, plain), ratio(run, runs[1]), *each, *drafting, *cost])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--target", type=PATH, required=True, help="Checkpoint folder, also read by vLLM.")
@click.option("--drafter", type=PATH, help="Checkpoint folder, read by vLLM.")
@click.option("--prompts", type=PATH, required=True, help="JSON lines: domain, kind, prompt (or text), ready-made.")
@click.option("--bundle", type=PATH, multiple=True, help="Bundle of this project's engine; repeatable.")
@click.option("--genai-python", type=PATH, help="Python with openvino-genai.")
@click.option("--genai-target", type=PATH, help="Exported folder.")
@click.option("--genai-drafter", type=PATH, help="Exported folder.")
@click.option("--genai-draft-tokens", default=11, show_default=True)
@click.option("--vllm-python", type=PATH, help="Python with vllm-cpu.")
@click.option("--vllm-draft-tokens", default=7, show_default=True)
@click.option("--llama-server", type=PATH, help="Binary of llama.cpp.")
@click.option("--llama-target", type=PATH, help="GGUF file.")
@click.option("--llama-drafter", type=PATH, help="GGUF file.")
@click.option("--llama-draft-tokens", default=7, show_default=True)
@click.option("--per-domain", default=10, show_default=True, help="Prompts of each domain.")
@click.option("-n", "--max-new-tokens", default=128, show_default=True)
@click.option("--threads", type=int, multiple=True, default=[1, 2], show_default=True)
@click.option("--repeats", default=1, show_default=True)
@click.option("--one-at-a-time", is_flag=True, help="Alternate engines by repeat, for lack of memory, not by prompt.")
@click.option("--json", "json_file", type=PATH, help="Write every measurement here.")
def main(**given: Any) -> None:
    prompts, results = read_prompts(given["prompts"], given["per_domain"]), []
    for threads in given["threads"]:
        runs = plan(given, threads)
        for repeat in range(given["repeats"]):
            present = [run for run in runs if not run.failure]
            for group in [[run] for run in present] if given["one_at_a_time"] else [present]:
                execute(group, prompts, repeat)
        click.echo(f"\nThreads: {threads}\n\n{table(runs)}")
        for run in runs:
            requests = [{"repeat": r, "prompt": i, **reply} for (r, i), reply in run.replies.items()]
            named = {key: getattr(run, key) for key in ("engine", "mode", "options", "failure", "load_seconds")}
            results.append({**named, "requests": requests})
    if given["json_file"]:
        given["json_file"].write_text(json.dumps({"machine": os.uname(), "cpus": os.cpu_count(), "runs": results}))


if __name__ == "__main__":
    main()
