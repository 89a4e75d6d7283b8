"""Embed the engine: load a bundle once, then stream answers.

python minimal.py BUNDLE "Why is the sky blue?"
"""

import sys

from dflash_runtime import GenerationConfig, load

bundle, question = sys.argv[1:]
engine = load(bundle)
for text in engine.stream([{"role": "user", "content": question}], GenerationConfig(max_new_tokens=128)):
    print(text, end="", flush=True)
print()
