"""The published pairs: which drafter belongs to which target, and whether this version exports the pair.

Knows names on the Hub and why a pair is not supported. Does not look at checkpoints: a pair that is not listed may
still work, and what a checkpoint really holds is checked when it is read (`hf_config`, `drafter_config`).
"""

from dataclasses import dataclass

from dflash_graphs.errors import UnsupportedError

_MOE = "mixture-of-experts target"
_MLA = "mixture-of-experts target with latent attention (MLA)"
_GPT_OSS = "gpt-oss architecture: mixture of experts, attention sinks"
_GEMMA = "Gemma 4 architecture"
_MUSE = "Muse Glimmer architecture"
_DRIVING = "vision-language-action target"
_DFLASH2 = "DFlash 2 drafter"
_DSPARK = "DSpark drafter"
_NEMOTRON = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B"
_ANCHOR_FIRST = "anchor-first block layout (DeepSpec)"
_SPECULATORS = "speculators packaging"


@dataclass(frozen=True)
class Pair:
    """A target and a drafter trained for it, both as Hub ids.

    `kind` is dflash, dflash2 or dspark; `block_size` counts the anchor and is None where the configuration is gated.
    `obstacle` says in a few words why the pair is not supported, None where it is.
    """

    target: str
    drafter: str
    kind: str
    block_size: int | None
    obstacle: str | None = None

    @property
    def supported(self) -> bool:
        return self.obstacle is None


# The drafter to take for a target comes first among its rows.
PAIRS: tuple[Pair, ...] = (
    # Qwen
    Pair("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "dflash", 16),
    Pair("Qwen/Qwen3-4B", "deepseek-ai/dflash_qwen3_4b_block7", "dflash", 7, _ANCHOR_FIRST),
    Pair("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", "dspark", 7, _DSPARK),
    Pair("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "dflash", 16),
    Pair("Qwen/Qwen3-8B", "deepseek-ai/dflash_qwen3_8b_block7", "dflash", 7, _ANCHOR_FIRST),
    Pair("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", "dspark", 7, _DSPARK),
    Pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash", "dflash", 8, _SPECULATORS),
    Pair("Qwen/Qwen3-14B", "deepseek-ai/dflash_qwen3_14b_block7", "dflash", 7, _ANCHOR_FIRST),
    Pair("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", "dspark", 7, _DSPARK),
    Pair("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash", "dflash", 16),
    Pair("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", "dflash", 16),
    Pair("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", "dflash", 16),
    Pair("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3.5-397B-A17B", "z-lab/Qwen3.5-397B-A17B-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", "dflash", 16),
    Pair("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", "dflash", 16, _MOE),
    Pair("Qwen/Qwen3.6-35B-A3B", "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", "dspark", 8, _MOE),
    Pair("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", "dflash2", 8, _DFLASH2),
    Pair("Qwen/Qwen3.8-27B", "incoai/Qwen3.8-27B-DFlash2", "dflash2", 8, _DFLASH2),
    Pair("Qwen/Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", "dspark", 7, _DSPARK),
    Pair("Qwen/Qwen3.8-27B", "RedHatAI/Qwen3.8-27B-speculator.dspark", "dspark", 8, _DSPARK),
    # Llama
    Pair("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "dflash", 10),
    # Gemma
    Pair("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash", "dflash", 16, _GEMMA),
    Pair("google/gemma-4-12B-it", "deepseek-ai/dflash_gemma4_12b_block7", "dflash", 7, _GEMMA),
    Pair("google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7", "dspark", 7, _GEMMA),
    Pair("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", "dflash", 16, _GEMMA),
    Pair("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dspark", "dspark", 8, _GEMMA),
    Pair("google/gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash", "dflash", 16, _MOE),
    # gpt-oss
    Pair("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", "dflash", 8, _GPT_OSS),
    Pair("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", "dflash", 10, _GPT_OSS),
    # others
    Pair("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash", "dflash", 8, _MLA),
    Pair("moonshotai/Kimi-K2.6", "z-lab/Kimi-K2.6-DFlash", "dflash", None, _MLA),
    Pair("moonshotai/Kimi-K2.7-Code", "nvidia/Kimi-K2.7-Code-DFlash", "dflash", None, _MLA),
    Pair("MiniMaxAI/MiniMax-M2.5", "z-lab/MiniMax-M2.5-DFlash", "dflash", None, _MOE),
    Pair("MiniMaxAI/MiniMax-M2.7", "z-lab/MiniMax-M2.7-DFlash", "dflash", None, _MOE),
    Pair("zai-org/GLM-5.1-FP8", "z-lab/GLM-5.1-FP8-DFlash", "dflash", None, _MOE),
    Pair("zai-org/GLM-5.3-Flash", "incoai/GLM-5.3-Flash-DFlash2", "dflash2", 8, _MOE),
    Pair("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash-DSpark", "dspark", 5, _MOE),
    Pair("XiaomiMiMo/MiMo-V2.5-Pro", "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash", "dflash", 8, _MOE),
    Pair("poolside/Laguna-XS-2.1", "poolside/Laguna-XS-2.1-DFlash", "dflash", 16, "Laguna architecture"),
    Pair("meta-models/Muse-Glimmer-30B", "meta-models/Muse-Glimmer-30B-assistant", "dflash", None, _MUSE),
    Pair("meta-models/Muse-Glimmer-30B", "z-lab/Muse-Glimmer-30B-DFlash2", "dflash2", 16, _MUSE),
    Pair("meta-models/Muse-Glimmer-30B", "incoai/Muse-Glimmer-30B-DFlash2", "dflash2", 16, _MUSE),
    Pair(_NEMOTRON, f"{_NEMOTRON}-DFlash", "dflash", None, "mixture-of-experts target with Mamba layers"),
    Pair("nvidia/Alpamayo-1.5-10B", "z-lab/Alpamayo-1.5-10B-DFlash", "dflash", None, _DRIVING),
    Pair("nvidia/Alpamayo-R1-10B", "z-lab/Alpamayo-R1-10B-DFlash", "dflash", None, _DRIVING),
)


def drafter_for(target: str) -> Pair:
    """Return the supported pair of a target's Hub id; neither letter case nor a revision (`@…`) counts.

    Raises UnsupportedError with the reason when only unsupported drafters are published for it, and with what to do
    when the target is not listed at all.
    """
    known = [pair for pair in PAIRS if pair.target.lower() == target.lower().partition("@")[0]]
    for pair in known:
        if pair.supported:
            return pair
    if known:
        reasons = "; ".join(f"{pair.drafter}: {pair.obstacle}" for pair in known)
        raise UnsupportedError(f"no published drafter of {target} is supported yet ({reasons}).")
    raise UnsupportedError(
        f"no drafter is known for {target}; `dflash models` lists the published pairs. Name the drafter with "
        "--draft OWNER/NAME or --draft FOLDER, or export without one: --draft none."
    )
