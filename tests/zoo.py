"""Tiny real models in one shape: how each is built, what a batch of it is, and where it may be cut into stages.

The models are those of transformers wherever it has one, since users bring those; ``tests/nets.py`` has the rest. What
they compute is compared by ``tests/parity.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartConfig, BartForConditionalGeneration
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.resnet.modeling_resnet import ResNetConfig, ResNetForImageClassification
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration
from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

import epl
from tests.nets import MLP, MixedNet, TiedNet, UNet

__all__ = ["CASES", "Batch", "Case", "Cut", "annotate"]

Batch = dict[str, Any] | tuple[Any, ...]  # the model is called as model(**batch) or model(*batch)
Cut = list[list[str]]  # the module paths of each stage; modules that are in none go where dataflow puts them

WIDTH = 32
HEADS = 4
VOCABULARY = 61
CLASSES = 5
IGNORED = -100  # the label that cross entropy passes over
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # all inside the vocabulary


@dataclass(frozen=True)
class Draw:
    """Random tensors for one batch."""

    size: int
    length: int
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        # Drawn as float32 whatever the dtype, so that both dtypes see the same numbers.
        return torch.randn(self.size, *shape, generator=self.generator).to(self.dtype)

    def tokens(self, length: int | None = None) -> Tensor:
        shape = (self.size, length or self.length)
        return torch.randint(max(SPECIAL.values()) + 1, VOCABULARY, shape, generator=self.generator)

    def classes(self) -> Tensor:
        return torch.randint(CLASSES, (self.size,), generator=self.generator)

    def padding_mask(self) -> Tensor:
        """1 for a token and 0 for padding: samples of different lengths, none shorter than half."""
        lengths = torch.randint((self.length + 1) // 2, self.length + 1, (self.size, 1), generator=self.generator)
        return (torch.arange(self.length) < lengths).long()


@dataclass(frozen=True)
class Case:
    """A model with its batches and its cuts.

    Attributes:
        make: from the rate of dropout to the model.
        draw: from ``Draw`` to a batch.
        stages: a cut for each number of stages.
        length: tokens of a sample, or pixels along a side of an image, unless asked otherwise.
        loss_fn: as in ``epl.parallelize``; None where the model's output is or has the loss.
        widen: makes a model's code, where it knows float32 only, fit for float64.
        has_dropout: whether dropout can be set.
        independent_samples: whether a sample's loss is its own; batch normalisation mixes the samples of a part.
        float32_inside: whether parts of the model compute in float32 even in a float64 model.
    """

    name: str
    make: Callable[[float], nn.Module]
    draw: Callable[[Draw], Batch]
    stages: dict[int, Cut]
    length: int = 8
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    widen: Callable[[nn.Module], None] | None = None
    has_dropout: bool = True
    independent_samples: bool = True
    float32_inside: bool = False

    def build(self, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        """Build the model in training mode: the same weights for the same seed, whatever was drawn before."""
        if dropout and not self.has_dropout:
            raise ValueError(f"{self.name} has no dropout to set to {dropout}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make(dropout).to(dtype).train()
        if dtype is torch.float64 and self.widen is not None:
            self.widen(model)
        return model

    def batch(
        self, size: int, seed: int = 0, *, dtype: torch.dtype = torch.float32, length: int | None = None
    ) -> Batch:
        """Draw a batch; every sample has the same number of labels, so parts of it weigh by their samples."""
        return self.draw(Draw(size, length or self.length, dtype, torch.Generator().manual_seed(seed)))

    def accuracy(self, dtype: torch.dtype) -> torch.dtype:
        """How exact this model is in ``dtype``: what ``assert_close`` is to be given."""
        return torch.float32 if self.float32_inside else dtype


def annotate(model: nn.Module, cut: Cut, device_counts: Sequence[int] | None = None, kind: Any = None) -> nn.Module:
    """Give each stage of the cut a strategy of its own, on one device unless ``device_counts`` says."""
    for i, paths in enumerate(cut):
        strategy = (kind or epl.replicate)(device_counts[i] if device_counts else 1, name=f"stage_{i}")
        for path in paths:
            strategy(model.get_submodule(path))
    return model


def _cuts(units: list[str], *starts: tuple[int, ...]) -> dict[int, Cut]:
    """Cut a list of module paths before each start, once for each tuple of starts."""
    cuts = [[units[i:j] for i, j in zip((0, *at), (*at, len(units)), strict=True)] for at in starts]
    return {len(cut): cut for cut in cuts}


def _numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{i}" for i in range(count)]


# ---------------------------------------------------------------------------------------------- models of transformers


def _bert(dropout: float) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS, "intermediate_size": 64}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **rates))


def _bert_batch(draw: Draw) -> Batch:
    """Two masked tokens in each sample, before its padding begins."""
    tokens, labels = draw.tokens(), torch.full((draw.size, draw.length), IGNORED)
    masked = torch.rand(draw.size, (draw.length + 1) // 2, generator=draw.generator).argsort(dim=1)[:, :2]
    labels.scatter_(1, masked, tokens.gather(1, masked))
    mask_token = SPECIAL["eos_token_id"]
    return {
        "input_ids": tokens.scatter(1, masked, mask_token),
        "attention_mask": draw.padding_mask(),
        "labels": labels,
    }


def _gpt2(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 4, "n_head": HEADS, "n_positions": 32}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **rates, **SPECIAL))
    model.loss_type = "ForCausalLM"  # what transformers falls back to after a warning: this class's name hides it
    return model


def _llama(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, attention_dropout=dropout, **sizes, **heads, **SPECIAL))


def _mixtral(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32}
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": dropout, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **options, **SPECIAL))


def _causal_batch(draw: Draw) -> Batch:
    tokens = draw.tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _t5(dropout: float) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 64, "num_heads": HEADS}
    layers = {"num_layers": 2, "num_decoder_layers": 2}
    options = {"dropout_rate": dropout, "use_cache": False, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **layers, **options, pad_token_id=0, eos_token_id=1))


def _bart(dropout: float) -> nn.Module:
    layers = {"encoder_layers": 2, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 64}
    layers |= {"decoder_layers": 2, "decoder_attention_heads": HEADS, "decoder_ffn_dim": 64}
    rates = {"dropout": dropout, "attention_dropout": dropout, "activation_dropout": dropout}
    options = {"max_position_embeddings": 32, "use_cache": False, "decoder_start_token_id": 2}
    options |= {"forced_eos_token_id": None, **SPECIAL}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, **layers, **rates, **options))


def _translation_batch(draw: Draw) -> Batch:
    # The target's length differs from the source's, so that mixing the two up cannot go unseen.
    return {
        "input_ids": draw.tokens(),
        "attention_mask": draw.padding_mask(),
        "labels": draw.tokens(draw.length - 2),
    }


def _vit(dropout: float) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS, "intermediate_size": 64}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=CLASSES, **sizes, **rates))


def _resnet(dropout: float) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12, 16], "depths": [1, 1, 1]}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=CLASSES, **sizes))


def _image_batch(draw: Draw) -> Batch:
    return {"pixel_values": draw.normal(3, draw.length, draw.length), "labels": draw.classes()}


# transformers casts logits to float32 for the loss of language models, and its quick experts refuse float64 on a CPU.
# Where a model is built in float64, its own switches for both are used.


def _masked_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), ignore_index=IGNORED)


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def _widen_masked_loss(model: nn.Module) -> None:
    model.loss_function = _masked_loss


def _widen_causal_loss(model: nn.Module) -> None:
    model.loss_function = _causal_loss


def _widen_mixtral(model: Any) -> None:
    model.loss_function = _causal_loss
    model.set_experts_implementation("batched_mm")


# ------------------------------------------------------------------------------------------------- models of our own


def _mlp_batch(draw: Draw) -> Batch:
    return draw.normal(WIDTH), draw.classes()


def _mlp_loss(model: nn.Module, batch: Any) -> Tensor:
    x, classes = batch
    return F.cross_entropy(model(x), classes)


def _tied_batch(draw: Draw) -> Batch:
    return draw.tokens(), draw.tokens()


def _unet_batch(draw: Draw) -> Batch:
    return {"image": draw.normal(3, draw.length, draw.length), "target": draw.normal(3, draw.length, draw.length)}


def _mixed_batch(draw: Draw) -> Batch:
    return {"x": draw.normal(WIDTH), "labels": draw.classes(), "mask": None, "depth": 2, "mode": "mean"}


_ENCODER = ["encoder.embed_tokens", *_numbered("encoder.block", 2), "encoder.final_layer_norm"]
_DECODER = ["decoder.embed_tokens", *_numbered("decoder.block", 2), "decoder.final_layer_norm"]
_FIRST = ("embed_tokens", "embed_positions", "layernorm_embedding")
_BART_ENCODER = [*(f"model.encoder.{name}" for name in _FIRST), *_numbered("model.encoder.layers", 2)]
_BART_DECODER = [*(f"model.decoder.{name}" for name in _FIRST), *_numbered("model.decoder.layers", 2)]

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        # The decoder's weight and the embedding are one parameter; padding masks go to every layer.
        Case(
            "bert",
            _bert,
            _bert_batch,
            _cuts(["bert.embeddings", *_numbered("bert.encoder.layer", 4), "cls"], (3,), (2, 4), (2, 3, 4)),
            widen=_widen_masked_loss,
        ),
        # Tied as well, with two embeddings in the first stage.
        Case(
            "gpt2",
            _gpt2,
            _causal_batch,
            _cuts(
                [
                    *("transformer.wte", "transformer.wpe"),
                    *_numbered("transformer.h", 4),
                    "transformer.ln_f",
                    "lm_head",
                ],
                *((4,), (3, 5), (3, 4, 5)),
            ),
            widen=_widen_causal_loss,
        ),
        # Rotary embeddings, computed once, are used by every layer; keys and values have half the heads.
        Case(
            "llama",
            _llama,
            _causal_batch,
            _cuts(
                ["model.embed_tokens", *_numbered("model.layers", 4), "model.norm", "lm_head"],
                *((3,), (2, 4), (2, 3, 4)),
            ),
            widen=_widen_causal_loss,
            float32_inside=True,
        ),
        # Which expert a token goes to hangs on its value.
        Case(
            "mixtral",
            _mixtral,
            _causal_batch,
            _cuts(
                ["model.embed_tokens", *_numbered("model.layers", 2), "model.norm", "lm_head"],
                *((2,), (2, 3), (1, 2, 3)),
            ),
            widen=_widen_mixtral,
            float32_inside=True,
        ),
        # The encoder's output goes to every layer of the decoder; one embedding has three users.
        Case(
            "t5",
            _t5,
            _translation_batch,
            _cuts([*_ENCODER, *_DECODER, "lm_head"], (4,), (4, 6), (2, 4, 6)),
            float32_inside=True,
        ),
        # Branches on a random number at each layer, even at rate 0.
        Case(
            "bart",
            _bart,
            _translation_batch,
            _cuts([*_BART_ENCODER, *_BART_DECODER, "lm_head"], (5,), (5, 9), (4, 5, 9)),
        ),
        Case(
            "vit",
            _vit,
            _image_batch,
            _cuts(
                ["vit.embeddings", *_numbered("vit.layers", 4), "vit.layernorm", "classifier"],
                *((3,), (2, 4), (2, 3, 4)),
            ),
            length=16,
        ),
        # Batch normalisation: running statistics are buffers, and each part of a batch is normalised by itself.
        Case(
            "resnet",
            _resnet,
            _image_batch,
            _cuts(
                ["resnet.embedder", *_numbered("resnet.encoder.stages", 3), "classifier"],
                *((2,), (1, 3), (1, 2, 3)),
            ),
            length=32,
            has_dropout=False,
            independent_samples=False,
        ),
        Case(
            "unet",
            lambda dropout: UNet(3, 4, dropout),
            _unet_batch,
            _cuts(["down1", "down2", "down3", "middle", "up3", "up2", "up1", "head"], (3,), (2, 5), (1, 2, 5)),
        ),
        Case(
            "mlp",
            lambda dropout: MLP(WIDTH, CLASSES, dropout),
            _mlp_batch,
            _cuts([*_numbered("blocks", 4), "head"], (2,), (1, 3), (1, 2, 3)),
            loss_fn=_mlp_loss,
        ),
        Case(
            "tied",
            lambda dropout: TiedNet(VOCABULARY, WIDTH, dropout),
            _tied_batch,
            _cuts(["embedding", *_numbered("blocks", 3), "head"], (2,), (2, 3), (1, 2, 3)),
        ),
        Case(
            "none_int",
            lambda dropout: MixedNet(WIDTH, CLASSES, dropout),
            _mixed_batch,
            _cuts(["scale", *_numbered("blocks", 4), "head"], (3,), (2, 4), (2, 3, 4)),
        ),
    )
}
