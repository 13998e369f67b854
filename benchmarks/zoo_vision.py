"""Models of images from transformers, and of images with texts."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo import Architecture, Batch, from_transformers
from benchmarks.zoo_text import SIZES, texts

NUM_CLASSES = 5
_PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": NUM_CLASSES,
}
_STAGES = {"num_labels": NUM_CLASSES, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 32}
_WINDOWS = {
    "num_labels": NUM_CLASSES,
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
_RESIDUAL = {"num_labels": NUM_CLASSES, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
_PYRAMID = _STAGES | {"num_attention_heads": [1, 1, 2, 2], "num_encoder_blocks": 4, "decoder_hidden_size": 32}


def pictures(size: int) -> Callable[[int], Batch]:
    """Make images of a size, with a class for each."""
    return lambda batch: {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(NUM_CLASSES, (batch,)),
    }


def pictures_alone(batch: int) -> Batch:
    """Make images without labels."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def pictures_with_maps(batch: int) -> Batch:
    """Make images, with a class for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.randint(NUM_CLASSES, (batch, 64, 64))}


def pictures_with_depths(batch: int) -> Batch:
    """Make images, with a depth for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.rand(batch, 64, 64) + 0.1}


def pictures_with_boxes(batch: int) -> Batch:
    """Make images, with two things to find in each."""
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.3 + 0.2} for _ in range(batch)]
    return {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": labels}


def pictures_with_texts(batch: int) -> Batch:
    """Make images, with a text for each."""
    text = texts(batch)
    text.pop("labels")
    return pictures_alone(batch) | text


def _contrasted(batch: int) -> Batch:
    return pictures_with_texts(batch) | {"return_loss": True}


def _asked(batch: int) -> Batch:
    return pictures_with_texts(batch) | {"labels": torch.rand(batch, NUM_CLASSES)}


def _captioned(batch: int) -> Batch:
    return pictures_alone(batch) | texts(batch)


_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1] * 4,
    "layer_type": "basic",
    "out_features": ["stage4"],
}
_DETECTION = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 10,
    "num_labels": NUM_CLASSES,
}


def _detector(kind: str, maker: str, **options: Any) -> Architecture:
    """Make a detector over a small ResNet."""

    def make() -> torch.nn.Module:
        import transformers

        backbone = {key: value for key, value in _BACKBONE.items() if key != "model_type"}
        chosen = _DETECTION | options | {"backbone_config": transformers.ResNetConfig(**backbone)}
        return from_transformers(kind, maker, pictures_with_boxes, chosen).make()

    return Architecture(name=kind, library="transformers", make=make, make_batch=pictures_with_boxes)


_TWO = {
    "text_config": SIZES | {"projection_dim": 16, "hidden_act": "gelu"},
    "vision_config": _PATCHES | {"projection_dim": 16},
    "projection_dim": 16,
}
_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": _PATCHES,
    "beit": _PATCHES,
    "data2vec-vision": _PATCHES,
    "dinov2": _PATCHES,
    "vit_msn": _PATCHES,
    "ijepa": _PATCHES,
    "dinov2_with_registers": _PATCHES,
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "poolformer": _STAGES,
    "resnet": _RESIDUAL | {"layer_type": "basic"},
    "regnet": _RESIDUAL | {"groups_width": 8},
    "bit": _RESIDUAL | {"num_groups": 4},
    "mobilenet_v1": {"num_labels": NUM_CLASSES, "depth_multiplier": 0.25},
    "mobilenet_v2": {"num_labels": NUM_CLASSES, "depth_multiplier": 0.25},
    "mobilevit": {
        "num_labels": NUM_CLASSES,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
        "image_size": 32,
    },
    "pvt_v2": _PYRAMID,
    "cvt": {
        "num_labels": NUM_CLASSES,
        "embed_dim": [16, 32, 32],
        "num_heads": [1, 2, 2],
        "depth": [1, 2, 3],
        "cls_token": [False, False, True],
    },
    "focalnet": _WINDOWS | {"hidden_sizes": [16, 32], "focal_levels": [1, 1], "focal_windows": [3, 3]},
    "hiera": {
        "num_labels": NUM_CLASSES,
        "image_size": [32, 32],
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
    },
    "swiftformer": _STAGES | {"embed_dims": [16, 16, 32, 32]},
}

ARCHITECTURES = [
    *(
        from_transformers(kind, "AutoModelForImageClassification", pictures(32), more)
        for kind, more in _CLASSIFIERS.items()
    ),
    from_transformers("deit", "DeiTForImageClassification", pictures(32), _PATCHES),
    from_transformers(
        "levit",
        "LevitForImageClassification",
        pictures(64),
        {
            "num_labels": NUM_CLASSES,
            "hidden_sizes": [32] * 3,
            "depths": [1] * 3,
            "num_attention_heads": [2] * 3,
            "key_dim": [8] * 3,
            "image_size": 64,
        },
    ),
    from_transformers(
        "mobilevitv2",
        "AutoModelForImageClassification",
        pictures(64),
        {"num_labels": NUM_CLASSES, "width_multiplier": 0.25, "image_size": 64},
    ),
    from_transformers("pvt", "AutoModelForImageClassification", pictures(64), _PYRAMID, {"image_size": 64}),
    from_transformers(
        "vit_mae",
        "AutoModelForPreTraining",
        pictures_alone,
        _PATCHES,
        {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    from_transformers("segformer", "AutoModelForSemanticSegmentation", pictures_with_maps, _PYRAMID),
    from_transformers("glpn", "AutoModelForDepthEstimation", pictures_with_depths, _PYRAMID),
    from_transformers(
        "dpt",
        "AutoModelForDepthEstimation",
        pictures_alone,
        _PATCHES,
        {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
        },
    ),
    _detector("detr", "DetrForObjectDetection"),
    _detector("conditional_detr", "ConditionalDetrForObjectDetection"),
    _detector("table-transformer", "TableTransformerForObjectDetection"),
    from_transformers(
        "yolos",
        "YolosForObjectDetection",
        pictures_with_boxes,
        _PATCHES,
        {"image_size": [64, 64], "num_detection_tokens": 10},
    ),
    from_transformers("clip", "CLIPModel", _contrasted, _TWO),
    from_transformers("siglip", "SiglipModel", _contrasted, _TWO),
    from_transformers("blip", "BlipForConditionalGeneration", _captioned, _TWO),
    from_transformers("vilt", "ViltForQuestionAnswering", _asked, SIZES, _PATCHES, {"max_image_length": -1}),
    from_transformers("git", "GitForCausalLM", _captioned, SIZES, {"vision_config": _PATCHES}),
]
