"""More tiny `transformers` models, of kinds that `zoo` does not have; each with a function that gives its loss on a random batch."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from tests.models.zoo import DECODER, ENCODER, VOCAB, Task, causal, masked, tokens

# -- text -------------------------------------------------------------------------------------------


def _bart() -> nn.Module:
    # fmt: off
    config = hf.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )
    # fmt: on
    return hf.BartForConditionalGeneration(config)


def _deberta() -> nn.Module:
    relative = dict(relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True)
    config = hf.DebertaV2Config(vocab_size=VOCAB, max_position_embeddings=32, **relative, **{**ENCODER, "num_hidden_layers": 1})
    return hf.DebertaV2ForMaskedLM(config)


def _fnet() -> nn.Module:
    sizes = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=32, tpu_short_seq_length=16)
    return hf.FNetForMaskedLM(hf.FNetConfig(vocab_size=VOCAB, hidden_dropout_prob=0.0, **sizes))


def _mamba2() -> nn.Module:
    sizes = dict(hidden_size=32, state_size=8, num_hidden_layers=1, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
    return hf.Mamba2ForCausalLM(hf.Mamba2Config(vocab_size=VOCAB, **sizes))


def _rwkv() -> nn.Module:
    sizes = dict(hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2, context_length=32)
    return hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=VOCAB, **sizes))


def _deepseek() -> nn.Module:
    experts = dict(moe_intermediate_size=16, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=0)
    latent = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
    sizes = {**DECODER, "num_key_value_heads": 4, "num_hidden_layers": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, **experts, **latent))


def _unpadded(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    ids = tokens(generator)
    labels = ids.clone()
    labels[:, ::2] = -100
    return model(input_ids=ids.to(device), labels=labels.to(device)).loss


# -- images, sound ----------------------------------------------------------------------------------


def _convnext() -> nn.Module:
    config = hf.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5, image_size=32)
    return hf.ConvNextV2ForImageClassification(config)


def _swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5, drop_path_rate=0.0
    )
    return hf.SwinForImageClassification(config)


def _segformer() -> nn.Module:
    # fmt: off
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5, drop_path_rate=0.0, classifier_dropout_prob=0.0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    # fmt: on
    return hf.SegformerForSemanticSegmentation(config)


def _vit_mae() -> nn.Module:
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=24)
    return hf.ViTMAEForPreTraining(hf.ViTMAEConfig(image_size=16, patch_size=4, **decoder, **ENCODER))


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    # fmt: off
    config = hf.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=6, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, num_labels=5,
    )
    # fmt: on
    return hf.DetrForObjectDetection(config)


def _wav2vec2() -> nn.Module:
    # fmt: off
    config = hf.Wav2Vec2Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_stride=(5, 4),
        conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, activation_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0,
        ctc_loss_reduction="mean",
    )
    # fmt: on
    return hf.Wav2Vec2ForCTC(config)


def _classified(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    images, labels = torch.randn(2, 3, 32, 32, generator=generator), torch.randint(0, 5, (2,), generator=generator)
    return model(pixel_values=images.to(device), labels=labels.to(device)).loss


def _segmented(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    images, labels = torch.randn(2, 3, 32, 32, generator=generator), torch.randint(0, 5, (2, 32, 32), generator=generator)
    return model(pixel_values=images.to(device), labels=labels.to(device)).loss


def _reconstructed(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    images, noise = torch.randn(2, 3, 16, 16, generator=generator), torch.rand(2, 16, generator=generator)
    return model(pixel_values=images.to(device), noise=noise.to(device)).loss


def _detected(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    """The loss matches queries with boxes on the host, so that a step takes several programs on any device."""
    images = torch.randn(2, 3, 32, 32, generator=generator).to(device)
    labels = []
    for _ in range(2):
        classes, boxes = torch.randint(0, 5, (2,), generator=generator), torch.rand(2, 4, generator=generator) * 0.3 + 0.2
        labels.append({"class_labels": classes.to(device), "boxes": boxes.to(device)})
    return model(pixel_values=images, labels=labels).loss


def _heard(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    sound, labels = torch.randn(2, 400, generator=generator), torch.randint(1, 8, (2, 5), generator=generator)
    return model(input_values=sound.to(device), labels=labels.to(device)).loss


# -- several kinds of input -------------------------------------------------------------------------


def _llava() -> nn.Module:
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    text = hf.LlamaConfig(**{**DECODER, "num_hidden_layers": 1})
    config = hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**vision), image_token_id=1, vision_feature_layer=-1)
    return hf.LlavaForConditionalGeneration(config)


def _clip() -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    text = dict(vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=2, bos_token_id=0, pad_token_id=1, **sizes)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=dict(image_size=16, patch_size=4, **sizes), projection_dim=8))


def _qwen2_vl() -> nn.Module:
    rope = dict(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
    vision = dict(
        depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2
    )
    text = dict(**{**DECODER, "num_hidden_layers": 1}, bos_token_id=None, eos_token_id=None, **rope)
    marks = dict(image_token_id=5, video_token_id=7, vision_start_token_id=4, vision_end_token_id=6)
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision, **marks))


def _patchtst() -> nn.Module:
    sizes = dict(num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=1)
    dropouts = dict(attention_dropout=0.0, positional_dropout=0.0, ff_dropout=0.0, head_dropout=0.0)
    return hf.PatchTSTForPrediction(hf.PatchTSTConfig(num_attention_heads=2, ffn_dim=24, prediction_length=4, **sizes, **dropouts))


def _described(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    ids = tokens(generator, 14)
    ids[:, 1:5] = 1
    labels = ids.masked_fill(ids == 1, -100)
    images = torch.randn(2, 3, 8, 8, generator=generator)
    return model(input_ids=ids.to(device), pixel_values=images.to(device), labels=labels.to(device)).loss


def _matched(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    ids, images = tokens(generator), torch.randn(2, 3, 16, 16, generator=generator)
    return model(input_ids=ids.to(device), pixel_values=images.to(device), return_loss=True).loss


def _seen(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    """Text around an image of 4 x 4 patches, merged two by two."""
    ids = tokens(generator, 14).clamp(min=8)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 4, 5, 6
    patches, grid = torch.randn(32, 96, generator=generator), torch.tensor([[1, 4, 4]] * 2)
    text = dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 5).int(), labels=ids)
    return model(**{k: v.to(device) for k, v in dict(text, pixel_values=patches, image_grid_thw=grid).items()}).loss


def _forecast(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    past, future = torch.randn(3, 16, 2, generator=generator), torch.randn(3, 4, 2, generator=generator)
    return F.mse_loss(model(past_values=past.to(device)).prediction_outputs, future.to(device))


MORE = {
    "bart": Task(_bart, causal),
    "deberta_v2": Task(_deberta, masked),
    "fnet": Task(_fnet, _unpadded),
    "mamba2": Task(_mamba2, causal),
    "deepseek_v3": Task(_deepseek, causal),
    "convnextv2": Task(_convnext, _classified),
    "segformer": Task(_segformer, _segmented),
    "detr": Task(_detr, _detected),
    "wav2vec2": Task(_wav2vec2, _heard),
    "llava": Task(_llava, _described),
}
"""Ten families: cross attention, relative position buckets, Fourier mixing, a state space, routed experts, a convnet, segmentation, a detector, speech, a
multimodal model."""

REST = {
    "rwkv": Task(_rwkv, causal),
    "swin": Task(_swin, _classified),
    "vit_mae": Task(_vit_mae, _reconstructed),
    "clip": Task(_clip, _matched),
    "qwen2_vl": Task(_qwen2_vl, _seen),
    "patchtst": Task(_patchtst, _forecast),
}
"""What `python -m tests.models` trains besides."""
