"""Model families of `transformers` at tiny sizes, made from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from library_checks import VOCAB, prompts, spread_logits

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Family:
    """config: settings beside the sizes. ops: what the family does to its LM head's product, as epilogue ops."""

    config: dict = field(default_factory=dict)
    ops: tuple[str, ...] = ()


DECODERS = {
    "bloom": Family(),
    "cohere": Family(ops=("mul",)),
    "cohere2": Family(ops=("mul",)),
    "falcon": Family(),
    "gemma2": Family(ops=("div", "tanh", "mul")),
    "gemma3_text": Family(),
    "gpt2": Family(),
    "gpt_neox": Family(),
    "gpt_oss": Family(),
    "gptj": Family({"rotary_dim": 8}, ops=("add",)),
    "granite": Family({"logits_scaling": 8.0}, ops=("div",)),
    "llama": Family(),
    "mamba": Family({"state_size": 8}),
    "mistral": Family(),
    "mixtral": Family(),
    "olmo2": Family(),
    "opt": Family(),
    "phi": Family(ops=("add",)),
    "qwen2": Family({"tie_word_embeddings": True}),
    "qwen3": Family(),
    "stablelm": Family(),
    "starcoder2": Family(),
}


def decoder(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The decoder-only model `name` of `DECODERS` with random weights; `model(ids).logits` are `[B, L, VOCAB]`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(SIZES | DECODERS[name].config))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = prompts()
    spread_logits(model.get_output_embeddings(), lambda: model(ids).logits[:, -1])
    return model


def bart() -> torch.nn.Module:
    """An encoder and decoder that adds a bias of its own, a buffer, to the logits."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**SEQ2SEQ_SIZES)).eval().requires_grad_(False)
    model.final_logits_bias.normal_()
    ids = prompts()
    spread_logits(model.get_output_embeddings(), lambda: model(input_ids=ids, decoder_input_ids=ids).logits[:, -1])
    return model


def t5() -> torch.nn.Module:
    """An encoder and decoder that scales the hidden states before its tied head."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval().requires_grad_(False)
    ids = prompts()
    spread_logits(model.get_output_embeddings(), lambda: model(input_ids=ids, decoder_input_ids=ids).logits[:, -1])
    return model
