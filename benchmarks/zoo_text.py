"""Models of text from transformers: encoders, decoders, and from texts to texts."""

from typing import Any

import torch

from benchmarks.zoo import VOCABULARY, Batch, from_transformers

LENGTH = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = SIZES | {"num_key_value_heads": 2, "use_cache": False}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PAIR = _DECODER | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "feed_forward_proj": "relu"}
_HEAD = {"head_dim": 8}


def texts(batch: int, length: int = LENGTH) -> Batch:
    """Make tokens and equal labels; every other row ends in a quarter of padding."""
    tokens = torch.randint(5, VOCABULARY, (batch, length))
    is_there = torch.ones(batch, length, dtype=torch.long)
    is_there[1::2, length * 3 // 4 :] = 0
    return {
        "input_ids": tokens.masked_fill(is_there == 0, 0),
        "attention_mask": is_there,
        "labels": tokens.masked_fill(is_there == 0, -100),
    }


def masked_texts(batch: int, length: int = LENGTH) -> Batch:
    """Make tokens with every seventh one masked, and labels with the original tokens."""
    settings, is_masked = texts(batch, length), torch.arange(length) % 7 == 3
    labels = settings["labels"].masked_fill(~is_masked, -100)
    return settings | {"input_ids": settings["input_ids"].masked_fill(is_masked, 3), "labels": labels}


def long_texts(batch: int) -> Batch:
    """Make tokens of twice the length, for attention in windows."""
    return masked_texts(batch, 2 * LENGTH)


_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "deberta": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "mpnet": {},
    "funnel": {"num_hidden_layers": ..., "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    "convbert": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "roformer": {},
    "fnet": {},
    "ibert": {},
    "megatron-bert": {},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16, "hidden_size": 32},
    "nystromformer": {},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 32},
    "xlm": {},
    "xlm-roberta": {},
    "camembert": {},
    "layoutlm": {"max_2d_position_embeddings": 64},
    "modernbert": {"local_attention": 16},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "data2vec-text": {},
    "yoso": {},
    "flaubert": {},
    "ernie": {},
}
_LONG_ENCODERS: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": 16, "max_position_embeddings": 72},
    "big_bird": {"block_size": 4, "num_random_blocks": 2},
    "reformer": {
        "num_hidden_layers": ...,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
        "num_hashes": 2,
        "is_decoder": False,
        "hash_seed": 1,
        "hidden_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,  # its dropout is seeded by the clock
    },
}
_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16, "num_layers": 2},
    "gptj": {"rotary_dim": 4},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "openai-gpt": {},
    "ctrl": {"dff": 64},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "mpt": {"max_seq_len": 64},
    "biogpt": {},
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": _EXPERTS,
    "qwen2": {},
    "qwen3": _HEAD,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | _HEAD,
    "gemma": _HEAD,
    "gemma2": _HEAD | {"sliding_window": 16},
    "gemma3_text": _HEAD | {"sliding_window": 16},
    "phi": {},
    "phi3": {},
    "falcon": {},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "falcon_mamba": {"state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "jamba": _EXPERTS
    | {
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "recurrent_gemma": {"attention_window_size": 16, "lru_width": 32},
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": _EXPERTS,
    "granite": {},
    "granitemoe": _EXPERTS,
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "starcoder2": {},
    "glm4": _HEAD,
    "nemotron": {},
    "persimmon": {},
    "smollm3": {},
    "bitnet": {},
    "lfm2": {},
    "diffllama": {},
}
_PAIRS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "longt5": _T5 | {"local_radius": 7},
    "switch_transformers": _T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bart": {},
    "mbart": {},
    "pegasus": {},
    "marian": {},
    "blenderbot": {},
    "blenderbot-small": {},
    "m2m_100": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "plbart": {},
    "nllb-moe": {
        "num_experts": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    "prophetnet": {
        "num_hidden_layers": ...,
        "encoder_layers": ...,
        "decoder_layers": ...,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]},
}
_LONG_PAIRS: dict[str, dict[str, Any]] = {
    "led": {"attention_window": 16, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 2},
    "pegasus_x": {"block_size": 16, "num_global_tokens": 4},
}


def _long_pair_texts(batch: int) -> Batch:
    return texts(batch, 2 * LENGTH)


ARCHITECTURES = [
    *(from_transformers(kind, "AutoModelForMaskedLM", masked_texts, SIZES, more) for kind, more in _ENCODERS.items()),
    *(
        from_transformers(kind, "AutoModelForMaskedLM", long_texts, SIZES, more)
        for kind, more in _LONG_ENCODERS.items()
    ),
    *(from_transformers(kind, "AutoModelForCausalLM", texts, _DECODER, more) for kind, more in _DECODERS.items()),
    *(from_transformers(kind, "AutoModelForSeq2SeqLM", texts, _PAIR, more) for kind, more in _PAIRS.items()),
    *(
        from_transformers(kind, "AutoModelForSeq2SeqLM", _long_pair_texts, _PAIR, more)
        for kind, more in _LONG_PAIRS.items()
    ),
]
