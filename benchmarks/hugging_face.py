"""Model types of Hugging Face's transformers, tiny and unchanged: random weights from a config in float64, and data for each.

Dropout is 0 in every config, since its masks differ between workers; layers that are left out at random are as well (Whisper's and BART's layerdrop, Swin's drop_path).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

VOCAB, LENGTH, SAMPLES = 64, 12, 26
Sample = tuple[dict[str, Tensor], Tensor]
Made = tuple[nn.Module, list[Sample], Callable[[Any, Tensor], Tensor]]

WIDE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}  # fmt: skip
GROUPED = {**WIDE, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 8},
    "Qwen3": {**GROUPED, "head_dim": 8},
    "Gemma2": {**GROUPED, "head_dim": 8},
    "Phi": WIDE,
    "GPT2": {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTNeoX": WIDE,
    "OPT": {
        "vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0,
    },
    "Bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
    "Falcon": WIDE,
    "Mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "Roberta": {**WIDE, **CALM, "max_position_embeddings": 40},
    "DebertaV2": {
        **WIDE, **CALM, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32,
    },
    "Electra": {**WIDE, **CALM, "embedding_size": 32, "max_position_embeddings": 32},
    "DistilBert": {
        "vocab_size": VOCAB, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
        "max_position_embeddings": 32,
    },
}  # fmt: skip
SEQUENCES: dict[str, dict[str, Any]] = {
    "T5": {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "Bart": {
        "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32, "dropout": 0.0,
    },
}  # fmt: skip
IMAGES: dict[str, dict[str, Any]] = {
    "ViT": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16, "patch_size": 4,
        **CALM,
    },
    "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    "Swin": {
        "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0,
    },
}  # fmt: skip
BATCHNORM = ("ResNet",)
NAMES = (*CAUSAL, *MASKED, *SEQUENCES, *IMAGES, "CLIP", "Whisper")


def make(name: str, samples: int = SAMPLES) -> Made:
    """(model, samples of (inputs by keyword, target), loss); the same every time."""
    torch.manual_seed(0)
    model, calls = _model(name)
    made = [calls() for _ in range(samples)]
    return model.double(), made, LOSSES.get(name, logits_loss)


def logits_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def pairs_loss(output: Any, target: Tensor) -> Tensor:
    """A contrastive loss is one over pairs of samples; this is one over samples: how near each text is to its image."""
    return (target - F.cosine_similarity(output.text_embeds, output.image_embeds)).square().mean()


LOSSES = {"CLIP": pairs_loss}


def _words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,))


def _model(name: str) -> tuple[nn.Module, Callable[[], Sample]]:
    if name in CAUSAL:
        config = getattr(hf, f"{name}Config")(**CAUSAL[name])
        return hf.AutoModelForCausalLM.from_config(config), _next_words
    if name in MASKED:
        config = getattr(hf, f"{name}Config")(**MASKED[name])
        return hf.AutoModelForMaskedLM.from_config(config), lambda: ({"input_ids": _words()}, _words())
    if name in SEQUENCES:
        config = getattr(hf, f"{name}Config")(**SEQUENCES[name])
        return hf.AutoModelForSeq2SeqLM.from_config(config), lambda: (
            {"input_ids": _words(), "decoder_input_ids": _words()},
            _words(),
        )
    if name in IMAGES:
        config = getattr(hf, f"{name}Config")(**IMAGES[name], num_labels=5)
        return hf.AutoModelForImageClassification.from_config(config), lambda: (
            {"pixel_values": torch.randn(3, 16, 16, dtype=torch.float64)},
            torch.randint(0, 5, (1,))[0],
        )
    return _clip() if name == "CLIP" else _whisper()


def _next_words() -> Sample:
    text = _words(LENGTH + 1)
    return {"input_ids": text[:-1]}, text[1:]


def _clip() -> tuple[nn.Module, Callable[[], Sample]]:
    text = {**WIDE, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    image = {k: v for k, v in WIDE.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    return hf.CLIPModel(config), lambda: (
        {"input_ids": _words(), "pixel_values": torch.randn(3, 16, 16, dtype=torch.float64)},
        torch.rand((), dtype=torch.float64),
    )


def _whisper() -> tuple[nn.Module, Callable[[], Sample]]:
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, max_target_positions=32, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), lambda: (
        {"input_features": torch.randn(8, 32, dtype=torch.float64), "decoder_input_ids": _words()},
        _words(),
    )
