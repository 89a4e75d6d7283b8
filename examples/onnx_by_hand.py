"""One round of speculative decoding in plain ONNX Runtime calls, without this project's runtime.

For programs that drive the graphs of a bundle themselves; exported with `dflash export … --backend onnx`. For clarity
arrays are passed and returned by value; bind `past_key.i` and `present_key.i` to the same memory to update caches in
place.

    python examples/onnx_by_hand.py BUNDLE "Tom has 3"
"""

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

POSITIONS = 128  # of the key/value caches; more than the example needs
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
Arrays = dict[str, NDArray[Any]]


class Graph:
    """A graph of the bundle and what it carries from call to call, zeros at first."""

    def __init__(self, bundle: Path, name: str) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # caches passed by value are copied, and warned about
        path = bundle / name / "model.onnx"
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.carried: Arrays = {"cache_positions": np.arange(POSITIONS, dtype=np.int32)}
        for port in self.session.get_inputs():
            if port.name.startswith(("past_", "state.")):
                shape = [POSITIONS if size == "P" else size for size in port.shape]
                self.carried[port.name] = np.zeros(shape, np.float32)

    def run(self, **inputs: NDArray[Any]) -> Arrays:
        wanted = {port.name for port in self.session.get_inputs()}
        given = {name: array for name, array in (self.carried | inputs).items() if name in wanted}
        names = [port.name for port in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, given), strict=True))


class Target(Graph):
    """The target: every call sees the committed tokens and its own; `commit` says how many of its own stay."""

    length = 0
    pending = 0  # committed rows that the recurrent states do not hold yet

    def verify(self, embeddings: NDArray[Any]) -> Arrays:
        pending = np.array([self.pending], np.int32)
        return self.run(embeddings=embeddings, position_ids=self.positions(len(embeddings)), pending_rows=pending)

    def positions(self, rows: int) -> NDArray[np.int32]:
        return np.arange(self.length, self.length + rows, dtype=np.int32)

    def commit(self, outputs: Arrays, count: int) -> None:
        """Take over the caches; rows after the committed ones are overwritten by the next call."""
        is_whole = count == len(outputs["hidden"])
        self.pending, self.length = 0 if is_whole else count, self.length + count
        for name, array in outputs.items():
            kind, _, layer = name.partition(".")
            if kind.startswith("present_"):
                self.carried[name.replace("present", "past")] = array
            elif kind == "rows":  # what the convolution reaches back to
                past = self.carried[f"past_{name}"]
                past[:] = np.concatenate([past, array[:count]])[-len(past) :]
            elif kind == "kept":  # for the next call to take into the state
                self.carried[f"past_{name}"][: self.pending] = array[: self.pending]
            elif kind == ("final_state" if is_whole else "next_state"):
                self.carried[f"state.{layer}"] = array


def one_round(bundle: Path, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return the draft tokens for what follows the prompt (at most 64 tokens), and the tokens that really follow."""
    manifest: dict[str, Any] = json.loads((bundle / "dflash.json").read_text(encoding="utf-8"))
    spec = manifest["drafter"]
    table = np.fromfile(bundle / "embeddings.bin", TYPES[manifest["embedding_dtype"]])
    table = table.reshape(manifest["target"]["vocab_size"], -1)
    target, drafter = Target(bundle, "target"), Graph(bundle, "drafter")
    head, context = Graph(bundle, "head"), Graph(bundle, "drafter_context")

    def embedded(tokens: list[int]) -> NDArray[Any]:
        return table[tokens].astype(np.float32)

    def best(hidden: NDArray[Any]) -> list[int]:
        outputs = head.run(hidden=hidden, drafted=hidden[:0])
        parts = [array for name, array in outputs.items() if name.startswith("logits.")]  # the lowest ids first
        tokens: list[int] = np.concatenate(parts, axis=1).argmax(axis=1).tolist()
        return tokens

    positions, outputs = target.positions(len(prompt)), target.verify(embedded(prompt))
    target.commit(outputs, len(prompt))
    anchor = best(outputs["hidden"][-1:])[0]

    for name, rows in context.run(features=outputs["features"], position_ids=positions).items():
        cache = drafter.carried[f"past_{name}"][0]  # heads, positions, entries; long keys are cut in parts
        parts = rows.reshape(len(rows), spec["attention"]["kv_heads"], -1, cache.shape[2])
        cache[:, : len(rows)] = parts.transpose(2, 1, 0, 3).reshape(len(cache), len(rows), -1)
    block = [anchor] + [spec["mask_token_id"]] * (spec["block_size"] - 1)
    drafted = drafter.run(embeddings=embedded(block), position_ids=target.positions(len(block)))
    drafts = best(drafted["hidden"][1:])

    outputs = target.verify(embedded([anchor, *drafts]))
    chosen, accepted = best(outputs["hidden"]), 0
    while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
        accepted += 1
    target.commit(outputs, 1 + accepted)  # the next anchor is chosen[accepted]
    return drafts, [anchor, *chosen[: accepted + 1]]


def main(bundle: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    drafts, tokens = one_round(bundle, tokenizer.encode(text).ids[:64])
    print(
        f"drafted {tokenizer.decode(drafts)!r}\nemitted {tokenizer.decode(tokens)!r}: {len(tokens) - 2} drafts accepted"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
