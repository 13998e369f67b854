"""Architectures of timm, torchvision, torchaudio and diffusers, by the functions and classes that make them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo import Architecture, Batch

NUM_CLASSES = 5


class Scored(nn.Module):
    """A model that scores images or their pixels, with the cross entropy that trains it, auxiliary scores included."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 3, height, width]`` and their labels to the loss."""
        output: Any = self.model(images)
        if isinstance(output, dict):
            output = tuple(output.values())
        scores = output if isinstance(output, tuple) else (output,)
        return torch.stack([nn.functional.cross_entropy(score, labels) for score in scores if score is not None]).sum()


class Positional(nn.Module):
    """A model whose forward takes what a batch holds in order."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        """Call the model with the batch's values."""
        return self.model(*batch.values())


def images(size: int) -> Callable[[int], Batch]:
    """Make images of a size, with a class for each."""
    return lambda batch: {"images": torch.randn(batch, 3, size, size), "labels": torch.randint(NUM_CLASSES, (batch,))}


def images_with_maps(batch: int) -> Batch:
    """Make images, with a class for each pixel."""
    return {"images": torch.randn(batch, 3, 64, 64), "labels": torch.randint(NUM_CLASSES, (batch, 64, 64))}


def images_with_boxes(batch: int) -> Batch:
    """Make images as detectors take them, with two things in each."""
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [20.0, 10.0, 60.0, 50.0]])
    targets = [{"boxes": boxes + index, "labels": torch.tensor([1, 2])} for index in range(batch)]
    return {"images": list(torch.rand(batch, 3, 64, 64)), "targets": targets}


def _timm(name: str, size: int = 32, **options: Any) -> Architecture:
    def make() -> nn.Module:
        timm = importlib.import_module("timm")
        maker = getattr(timm.models, name, None)  # a class takes options that its functions fix
        model = maker if isinstance(maker, type) else functools.partial(timm.create_model, name)
        return Scored(model(num_classes=NUM_CLASSES, **options))

    return Architecture(name=f"timm/{name}", library="timm", make=make, make_batch=images(size))


def _torchvision(
    name: str,
    size: int = 32,
    wrap: Callable[[nn.Module], nn.Module] = Scored,
    make_batch: Callable[[int], Batch] | None = None,
    **options: Any,
) -> Architecture:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        maker = getattr(models, name, None)
        model = maker if isinstance(maker, type) else functools.partial(models.get_model, name, weights=None)
        return wrap(model(num_classes=NUM_CLASSES, **options))

    return Architecture(
        name=f"torchvision/{name}", library="torchvision", make=make, make_batch=make_batch or images(size)
    )


def _torchaudio(name: str, make_batch: Callable[[int], Batch], **options: Any) -> Architecture:
    def make() -> nn.Module:
        models = importlib.import_module("torchaudio.models")
        return Positional(getattr(models, name)(**options))

    return Architecture(name=f"torchaudio/{name}", library="torchaudio", make=make, make_batch=make_batch)


def _diffusers(name: str, make_batch: Callable[[int], Batch], **options: Any) -> Architecture:
    def make() -> nn.Module:
        diffusers = importlib.import_module("diffusers")
        model: nn.Module = getattr(diffusers, name)(**options)
        return model

    return Architecture(name=f"diffusers/{name}", library="diffusers", make=make, make_batch=make_batch)


_TRANSFORMER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_TIMM = [
    _timm("resnet18", block_args={}, channels=(16, 16, 32, 32), layers=(1, 1, 1, 1)),
    _timm("test_efficientnet", 64),
    _timm("test_vit", 160),
    _timm("test_resnet", 64),
    _timm("test_convnext", 64),
    _timm("mobilenetv3_small_050", 64),
    _timm("ghostnet_050", 64),
    _timm("mnasnet_050", 64),
    _timm("lcnet_035", 64),
    _timm("vit_tiny_patch16_224", **_TRANSFORMER),
    _timm("deit_tiny_distilled_patch16_224", **_TRANSFORMER),
    _timm("MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm("ConvMixer", dim=32, depth=2),
    _timm("MetaFormer", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("cait_xxs24_224", **_TRANSFORMER),
    _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    _timm("beit_base_patch16_224", **_TRANSFORMER),
    _timm("eva02_tiny_patch14_224", **_TRANSFORMER),
    _timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2)),
    _timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _timm("dla34", channels=(8, 8, 16, 16, 32, 32)),
    _timm("edgenext_xx_small", 64, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("regnetx_002", 64),
]


def _vgg() -> Architecture:
    """Make a VGG with half of its stages, and with a head that is not most of the model."""

    def make() -> nn.Module:
        vgg = importlib.import_module("torchvision.models.vgg")
        model = vgg.VGG(vgg.make_layers([16, "M", 32, "M", 32, 32, "M"], batch_norm=True), num_classes=NUM_CLASSES)
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Sequential(
            nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, NUM_CLASSES)
        )
        return Scored(model)

    return Architecture(name="torchvision/vgg", library="torchvision", make=make, make_batch=images(32))


def _found(**options: Any) -> Architecture:
    few = {
        "rpn_pre_nms_top_n_train": 40,
        "rpn_post_nms_top_n_train": 10,
        "rpn_batch_size_per_image": 16,
        "box_batch_size_per_image": 8,
        "min_size": 64,
        "max_size": 64,
    }
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    return _torchvision(name, wrap=Positional, make_batch=images_with_boxes, weights_backbone=None, **few, **options)


_TORCHVISION = [
    _torchvision("resnet18", 64),
    _torchvision("squeezenet1_1", 64),
    _torchvision("shufflenet_v2_x0_5", 64),
    _torchvision("mobilenet_v2", 64, width_mult=0.25),
    _torchvision("mobilenet_v3_small", 64),
    _torchvision("mnasnet0_5", 64),
    _torchvision("googlenet", 64, init_weights=False),
    _torchvision("DenseNet", 64, growth_rate=8, block_config=(2, 2), num_init_features=16),
    _torchvision("regnet_y_400mf", 64),
    _torchvision("efficientnet_b0", 64),
    _vgg(),
    _torchvision(
        "SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4]
    ),
    _torchvision(
        "VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    ),
    _torchvision("lraspp_mobilenet_v3_large", make_batch=images_with_maps, weights_backbone=None),
    _found(),
]


def _frames(batch: int) -> Batch:
    return {"input": torch.randn(batch, 24, 16), "lengths": torch.tensor([24] * (batch - 1) + [18])}


def _said(batch: int) -> Batch:
    return {
        "tokens": torch.randint(1, 20, (batch, 10)),
        "token_lengths": torch.tensor([10] * (batch - 1) + [8]),
        "mel_specgram": torch.randn(batch, 16, 12),
        "mel_specgram_lengths": torch.tensor([12] * batch),
    }


_TORCHAUDIO = [
    _torchaudio(
        "Conformer", _frames, input_dim=16, num_heads=2, ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7
    ),
    _torchaudio(
        "Emformer",
        lambda batch: {"input": torch.randn(batch, 20, 16), "lengths": torch.tensor([20] * batch)},
        input_dim=16,
        num_heads=2,
        ffn_dim=32,
        num_layers=2,
        segment_length=4,
        right_context_length=4,
        dropout=0.1,
    ),
    _torchaudio(
        "Tacotron2",
        _said,
        n_mels=16,
        n_symbol=20,
        symbol_embedding_dim=16,
        encoder_embedding_dim=16,
        attention_rnn_dim=16,
        attention_hidden_dim=16,
        attention_location_n_filter=4,
        attention_location_kernel_size=7,
        decoder_rnn_dim=16,
        prenet_dim=16,
        postnet_embedding_dim=16,
    ),
    _torchaudio(
        "Wav2Letter", lambda batch: {"x": torch.randn(batch, 8, 40)}, num_classes=5, input_type="mfcc", num_features=8
    ),
    _torchaudio("DeepSpeech", lambda batch: {"x": torch.randn(batch, 1, 20, 8)}, n_feature=8, n_hidden=32, n_class=5),
    _torchaudio(
        "WaveRNN",
        lambda batch: {"waveform": torch.randn(batch, 1, 72), "specgram": torch.randn(batch, 1, 8, 10)},
        upsample_scales=[3, 4],
        n_classes=16,
        hop_length=12,
        n_res_block=1,
        n_rnn=16,
        n_fc=16,
        n_freq=8,
        n_hidden=16,
        n_output=16,
    ),
    _torchaudio(
        "ConvTasNet",
        lambda batch: {"input": torch.randn(batch, 1, 256)},
        enc_num_feats=16,
        msk_num_feats=16,
        msk_num_hidden_feats=16,
        msk_num_layers=2,
        msk_num_stacks=1,
    ),
    _torchaudio(
        "wav2vec2_model",
        lambda batch: {"waveforms": torch.randn(batch, 1200)},
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.1,
        encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.1,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.1,
        encoder_dropout=0.1,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=5,
    ),
]


def _noised(channels: int, size: int = 16) -> Callable[[int], Batch]:
    return lambda batch: {"sample": torch.randn(batch, channels, size, size), "timestep": torch.arange(batch)}


def _noised_with_texts(name: str = "sample") -> Callable[[int], Batch]:
    return lambda batch: {
        name: torch.randn(batch, 4, 16, 16),
        "timestep": torch.arange(batch),
        "encoder_hidden_states": torch.randn(batch, 8, 16),
    }


_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
_CROSS = _BLOCKS | {
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_CODER = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}


def _coded(batch: int) -> Batch:
    return {"sample": torch.randn(batch, 3, 16, 16)}


_DIFFUSERS = [
    _diffusers(
        "UNet2DModel",
        _noised(3),
        **_BLOCKS,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    _diffusers("UNet2DConditionModel", _noised_with_texts(), **_CROSS),
    _diffusers("AutoencoderKL", _coded, **_CODER),
    _diffusers("VQModel", _coded, **{**_CODER, "num_vq_embeddings": 16}),
    _diffusers(
        "AutoencoderTiny",
        _coded,
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    _diffusers(
        "DiTTransformer2DModel",
        lambda batch: {
            "hidden_states": torch.randn(batch, 4, 8, 8),
            "timestep": torch.arange(batch),
            "class_labels": torch.arange(batch),
        },
        **_HEADS,
        in_channels=4,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
    _diffusers(
        "Transformer2DModel",
        lambda batch: {
            "hidden_states": torch.randn(batch, 8, 8, 8),
            "encoder_hidden_states": torch.randn(batch, 4, 16),
        },
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        in_channels=8,
        norm_num_groups=4,
        cross_attention_dim=16,
    ),
    _diffusers(
        "PriorTransformer",
        lambda batch: {
            "hidden_states": torch.randn(batch, 16),
            "timestep": torch.arange(batch),
            "proj_embedding": torch.randn(batch, 16),
            "encoder_hidden_states": torch.randn(batch, 6, 16),
        },
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=6,
        additional_embeddings=4,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        lambda batch: {
            "hidden_states": torch.randn(batch, 4, 8, 8),
            "encoder_hidden_states": torch.randn(batch, 6, 16),
            "pooled_projections": torch.randn(batch, 8),
            "timestep": torch.arange(batch),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    ),
]

ARCHITECTURES = [*_TIMM, *_TORCHVISION, *_TORCHAUDIO, *_DIFFUSERS]
