"""Models of speech and of time series from transformers."""

from typing import Any

import torch

from benchmarks.zoo import VOCABULARY, Batch, from_transformers
from benchmarks.zoo_text import SIZES

_WAVES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_SERIES = {
    "prediction_length": 4,
    "context_length": 16,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "moving_average": 5,
}
_PATCHES = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "prediction_length": 8,
    "d_model": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
}


def waves(batch: int) -> Batch:
    """Return sounds, and the text spoken in them."""
    return {"input_values": torch.randn(batch, 2000), "labels": torch.randint(1, 32, (batch, 8))}


def spectrograms(batch: int) -> Batch:
    """Make spectrograms, with a class for each."""
    return {"input_values": torch.randn(batch, 32, 16), "labels": torch.randint(5, (batch,))}


def spectrograms_with_texts(batch: int) -> Batch:
    """Return spectrograms for Whisper, and the text spoken in them."""
    return {"input_features": torch.randn(batch, 8, 64), "labels": torch.randint(5, VOCABULARY, (batch, 16))}


def features_with_texts(batch: int) -> Batch:
    """Make spectrograms and texts in the order of Speech2Text."""
    return {"input_features": torch.randn(batch, 64, 8), "labels": torch.randint(5, VOCABULARY, (batch, 16))}


def series(batch: int) -> Batch:
    """Make the past and the future of a series, with the time as a feature."""
    past, future = 18, 4  # as many as the context and its longest lag, and as are predicted
    return {
        "past_values": torch.randn(batch, past),
        "past_time_features": torch.randn(batch, past, 1),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": torch.randn(batch, future),
        "future_time_features": torch.randn(batch, future, 1),
    }


def channels(batch: int) -> Batch:
    """Make the past and the future of three channels."""
    return {"past_values": torch.randn(batch, 32, 3), "future_values": torch.randn(batch, 8, 3)}


_SPOKEN: dict[str, dict[str, Any]] = {
    "wav2vec2": {"mask_time_prob": 0.05, "mask_time_length": 2},
    "hubert": {},
    "wavlm": {"num_buckets": 16, "max_bucket_distance": 32},
    "sew": {"squeeze_factor": 2},
    "unispeech": {},
    "data2vec-audio": {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "wav2vec2-conformer": {"conv_depthwise_kernel_size": 7},
    "sew-d": {"squeeze_factor": 2, "position_buckets": 16},
}
_SPEECH_PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

ARCHITECTURES = [
    *(from_transformers(kind, "AutoModelForCTC", waves, _WAVES, more) for kind, more in _SPOKEN.items()),
    from_transformers(
        "audio-spectrogram-transformer",
        "AutoModelForAudioClassification",
        spectrograms,
        SIZES,
        {
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 32,
            "num_mel_bins": 16,
            "num_labels": 5,
        },
    ),
    from_transformers(
        "whisper",
        "WhisperForConditionalGeneration",
        spectrograms_with_texts,
        _SPEECH_PAIR,
        {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32},
    ),
    from_transformers(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        features_with_texts,
        _SPEECH_PAIR,
        {
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "num_conv_layers": 2,
            "conv_kernel_sizes": [3, 3],
            "max_source_positions": 64,
            "max_target_positions": 32,
        },
    ),
    from_transformers("time_series_transformer", "TimeSeriesTransformerForPrediction", series, _SERIES),
    from_transformers("informer", "InformerForPrediction", series, _SERIES),
    from_transformers("autoformer", "AutoformerForPrediction", series, _SERIES, {"label_length": 4}),
    from_transformers("patchtst", "PatchTSTForPrediction", channels, _PATCHES),
    from_transformers("patchtsmixer", "PatchTSMixerForPrediction", channels, _PATCHES),
]
