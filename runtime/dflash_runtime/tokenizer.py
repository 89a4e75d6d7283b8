"""Text to token ids and back, from the tokenizer files of a bundle.

Knows the files a Hugging Face folder describes its tokenizer with, and which ids end a generation. Knows nothing of
models, prompts or chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from dflash_graphs.errors import BundleError, RequestError

# Qwen3.5 reads combining marks as part of a word, yet folders of it circulate whose tokenizer.json still holds the
# pattern of Qwen2, which does not. transformers puts the right one in by the declared family; so must we.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPLIT = _QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def read_text(path: Path) -> str | None:
    """The text of a file, `None` where there is no such file.

    Raises:
        BundleError: the file is unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, an empty one where there is no such file.

    Raises:
        BundleError: the file is unreadable or does not hold a JSON object.
    """
    try:
        value = json.loads(read_text(path) or "{}")
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) of the folder, as transformers resolves them.

    Raises:
        BundleError: a file is damaged.
    """
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # Only folders older than that key keep the names in a file of their own.
        config |= read_json(folder / "special_tokens_map.json")
    extra = config.get("extra_special_tokens")
    named = config | extra if isinstance(extra, dict) else config
    found = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


class Tokenizer:
    """The tokenizer of a bundle: same ids as the fast tokenizer of transformers for the same folder."""

    def __init__(self, folder: Path) -> None:
        """Load `tokenizer.json` of `folder`; `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and
        `generation_config.json` are read where present.

        Raises:
            BundleError: `tokenizer.json` is missing, or a file is damaged.
        """
        self._backend = _load_backend(folder)
        self._stop_token_ids = _stop_token_ids(folder, self._backend)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id which the folder declares to end a generation; empty where it declares none."""
        return self._stop_token_ids

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the logits of a model may have more (padding) rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The tokenizer in the JSON form of `tokenizers`, as used here: split pattern, no truncation, no padding."""
        return self._backend.to_str()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its exact vocabulary spelling, `None` where there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled in the text become their ids.

        Args:
            add_special_tokens: also add what the post-processor of `tokenizer.json` adds (such as a leading BOS);
                pass False for a rendered chat template, which holds them already.

        Raises:
            RequestError: `text` holds half of a surrogate pair and so is not Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # how the library meets a lone surrogate
            raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes which are not UTF-8 read as U+FFFD, ids outside the vocabulary as nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> DetokenizeStream:
        """A detokenizer for ids which arrive in blocks."""
        return DetokenizeStream(self, skip_special_tokens)


class DetokenizeStream:
    """Turns blocks of token ids into text as they arrive; the parts joined equal `decode` of all ids.

    Not `tokenizers.decoders.DecodeStream`: that raises on invalid bytes of byte-fallback vocabularies, and holds back a
    whole block which ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """Start with no ids; `Tokenizer.stream` is the usual way here."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # ids of the last finished piece (context for spacing), then the newer ones
        self._context = 0  # ids of the window which belong to the finished piece
        self._emitted = 0  # characters of the window's text which were given out

    def push(self, ids: Iterable[int]) -> str:
        """Text which became certain with these ids, in order; empty while a character is incomplete."""
        self._window.extend(ids)
        text = self._text()
        # An incomplete character decodes to U+FFFD until its last byte arrives.
        certain = text.rstrip(_REPLACEMENT)
        fresh = certain[self._emitted :]
        self._emitted += len(fresh)
        if fresh and certain == text:
            del self._window[: self._context]
            self._context = len(self._window)
            self._emitted = len(self._text())
        return fresh

    def flush(self) -> str:
        """The text still held back, with U+FFFD for bytes which never became a character; the stream starts anew."""
        rest = self._text()[self._emitted :]
        self._window, self._context, self._emitted = [], 0, 0
        return rest

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


def _damaged(path: Path, reason: object) -> BundleError:
    return BundleError(f"{path} cannot be used ({reason}); export or download the bundle again")


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    serialized = read_text(path)
    if serialized is None:
        raise _damaged(path, "missing")
    if _is_qwen3_5(folder):
        serialized = serialized.replace(json.dumps(_QWEN2_SPLIT), json.dumps(_QWEN3_5_SPLIT))
    try:
        backend = tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:  # the library raises bare Exception
        raise _damaged(path, error) from error
    # Limits baked into the file are for training; a prompt is never cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _is_qwen3_5(folder: Path) -> bool:
    declared = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    model_type = str(read_json(folder / "config.json").get("model_type"))
    return declared.startswith("Qwen3_5Tokenizer") or model_type.startswith("qwen3_5")


def _stop_token_ids(folder: Path, backend: tokenizers.Tokenizer) -> frozenset[int]:
    # The files disagree: the configuration of Qwen3.5 names the end of a document, its tokenizer the end of a turn.
    config = read_json(folder / "config.json")
    text_config = config.get("text_config") or {}
    found: set[int] = set()
    for declaring in (read_json(folder / "generation_config.json"), config, text_config):
        ids = declaring.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    eos = backend.token_to_id(special_tokens(folder).get("eos_token", ""))
    return frozenset(found if eos is None else found | {eos})
