"""Tiny random-weight models in Hugging Face layout, made by transformers' own classes: the tests' reference models.

Deterministic by seed. Weights are scaled so that every part of a layer matters to the logits and greedy text does not
collapse into one repeated token (a test measures it); norm weights and biases are random too, since at their initial 1
and 0 a wrong or forgotten one would not show.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

transformers.logging.disable_progress_bar()

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VOCAB_SIZE = 512
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
EOS_TOKEN_ID = 2

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOKENIZER_TEXT = """
A token is a small piece of text. The model reads the tokens so far and gives every token of its vocabulary a number;
the sampler picks one of them, and the text grows by one piece. Nothing in this needs chance, and yet the same
question asked twice can be answered in two ways, because the order in which numbers are added changes their sum in
the last bit. Where two tokens are almost equally likely, that bit decides, and from there on every later token may
differ. To make the answer repeatable, an engine can draft quickly and then verify what it drafted with one fixed
order of additions, keeping what agrees and rolling back what does not. What is the capital of France? The capital of
France is Paris. How many days are there in a week? There are seven days in a week. Write a short story about a dog, a
river and an old bridge. Once upon a time there was a dog who lived beside a river, under an old bridge, and every
morning she watched the water carry leaves from the mountains to the sea. def add(first, second): return first +
second. for index in range(10): print(index). 0 1 2 3 4 5 6 7 8 9. Bien sûr, ça marche. Grüße aus Köln.
"""


def write_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "1GB",
    **overrides: Any,
) -> Path:
    """Write config, weights, tokenizer and generation config of a random model of `family` into `directory`; return it.

    `overrides` are fields of the family's transformers configuration. A small `max_shard_size` gives sharded weights.
    """
    config_class, model_class = _CLASSES[family]
    config = config_class(**{**_COMMON, **_OWN[family], **overrides})
    with torch.random.fork_rng(devices=[]):  # the constructors draw from the global generator
        model = model_class(config)
    _randomize(model, seed)
    model.to(dtype)
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS_TOKEN_ID, bos_token_id=config.bos_token_id)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tiny_tokenizer(directory, config.vocab_size)
    return directory


def write_tiny_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer (3 special tokens, 256 bytes, merges up to 512 tokens or `vocab_size`)."""
    (directory / "tokenizer.json").write_text(_tokenizer_json(min(vocab_size, VOCAB_SIZE)), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "unk_token": END_OF_TEXT,
        "pad_token": IM_END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [END_OF_TEXT, IM_START, IM_END]
    if vocab_size < len(alphabet) + len(specials):
        raise ValueError(f"vocab_size is {vocab_size}: a byte-level tokenizer needs {len(alphabet) + len(specials)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT.splitlines(), trainer)
    return tokenizer.to_str()


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter, in order of name, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.25 * noise
        elif name.endswith(("bias", "embed_tokens.weight", "lm_head.weight")):
            value = 0.3 * noise  # logits of standard deviation 2.5
        else:
            value = 0.2 * noise
        parameter.data.copy_(value)
