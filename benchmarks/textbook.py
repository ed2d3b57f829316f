"""CODA-P as written in the paper, as a baseline: nothing is shared, skipped or fused.

The ViT computes gradients of all its weights, attention is an explicit softmax matrix, both passes
run over all tokens of all blocks in every step, and the attended queries are a batch x components x
width tensor in each block (eqs. 3-5).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.vit.vit import ViT, ViTConfig


class TextbookViT(nn.Module):
    """A ViT with the weights of `ViT` and their gradients; every token passes every block."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.config: ViTConfig = vit.config
        weights = {name: nn.Parameter(value.clone()) for name, value in vit.state_dict().items()}
        self.names = {name: name.replace(".", "/") for name in weights}
        self.weights = nn.ParameterDict({self.names[name]: weights[name] for name in weights})
        self.stem = vit.patch_embed.__class__(vit.config)
        self.stem.load_state_dict(vit.patch_embed.state_dict())

    def get(self, name: str) -> Tensor:
        """Return a weight by its name in `ViT`."""
        weight: Tensor = self.weights[self.names[name]]
        return weight

    def forward(self, images: Tensor, prompts: dict[int, Tensor] | None = None) -> Tensor:
        """Return the class token after the final norm; `prompts` maps blocks to B x L x D."""
        config = self.config
        tokens = self.stem(images)  # B x tokens x D
        class_token = self.get("cls_token").expand(len(tokens), -1, -1)
        tokens = torch.cat([class_token, tokens], dim=1) + self.get("pos_embed")
        for block in range(config.depth):
            tokens = self.block(block, tokens, (prompts or {}).get(block))
        return self.norm("norm", tokens)[:, 0]

    def block(self, number: int, tokens: Tensor, prompt: Tensor | None) -> Tensor:
        prefix = f"blocks.{number}"
        normed = self.norm(f"{prefix}.norm1", tokens)
        query, key, value = self.linear(f"{prefix}.attn.qkv", normed).chunk(3, dim=-1)
        if prompt is not None:
            half = prompt.shape[1] // 2
            key = torch.cat([prompt[:, :half], key], dim=1)
            value = torch.cat([prompt[:, half:], value], dim=1)
        heads, size = self.config.heads, self.config.width // self.config.heads
        query, key, value = (
            part.reshape(len(part), -1, heads, size).transpose(1, 2) for part in (query, key, value)
        )
        scores = query @ key.transpose(-2, -1) * size**-0.5  # B x heads x tokens x (L/2 + tokens)
        attended = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        tokens = tokens + self.scaled(f"{prefix}.ls1", self.linear(f"{prefix}.attn.proj", attended))
        normed = self.norm(f"{prefix}.norm2", tokens)
        hidden = F.gelu(self.linear(f"{prefix}.mlp.fc1", normed))
        return tokens + self.scaled(f"{prefix}.ls2", self.linear(f"{prefix}.mlp.fc2", hidden))

    def scaled(self, name: str, update: Tensor) -> Tensor:
        return update * self.get(f"{name}.gamma") if self.config.layer_scale else update

    def linear(self, name: str, tokens: Tensor) -> Tensor:
        return F.linear(tokens, self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def norm(self, name: str, tokens: Tensor) -> Tensor:
        shape, eps = (self.config.width,), self.config.norm_eps
        return F.layer_norm(
            tokens, shape, self.get(f"{name}.weight"), self.get(f"{name}.bias"), eps
        )


class TextbookCoda(nn.Module):
    """CODA-P at the start of a task, with the values of a `CodaPrompt`."""

    def __init__(self, method: CodaPrompt) -> None:
        super().__init__()
        self.vit = TextbookViT(method.backbone)
        self.blocks = method.config.blocks
        parts = {}
        for kind in ("components", "keys", "attention"):
            old, new = getattr(method, kind).frozen, getattr(method, kind).trainable
            parts[f"old_{kind}"] = nn.Parameter(old.detach().clone(), requires_grad=False)
            if new is not None:
                parts[f"new_{kind}"] = nn.Parameter(new.detach().clone())
        self.parts = nn.ParameterDict(parts)
        self.first = method.classes_seen - int(method.task_sizes.rows[-1])
        self.head_weight = nn.Parameter(method.head.weight.frozen.clone())
        self.head_bias = nn.Parameter(method.head.bias.frozen.clone())

    def all_of(self, kind: str, block: int) -> Tensor:
        parts = [self.parts[f"old_{kind}"][block]]
        if f"new_{kind}" in self.parts:
            parts.append(self.parts[f"new_{kind}"][block])
        return torch.cat(parts)

    def prompts(self, query: Tensor) -> dict[int, Tensor]:
        """Return the prompt of each block (eqs. 3-5)."""
        prompts = {}
        for position, block in enumerate(self.blocks):
            attention, keys = self.all_of("attention", position), self.all_of("keys", position)
            attended = torch.einsum("bd,md->bmd", query, attention)  # B x M x D
            attended = F.normalize(attended, dim=2)
            weights = torch.einsum("bmd,md->bm", attended, F.normalize(keys, dim=1))
            prompts[block] = torch.einsum(
                "bm,mld->bld", weights, self.all_of("components", position)
            )
        return prompts

    def logits(self, images: Tensor) -> Tensor:
        """Return logits of all classes."""
        with torch.no_grad():
            query = self.vit(images)
        features = self.vit(images, self.prompts(query))
        return F.linear(features, self.head_weight, self.head_bias)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy over the classes of the current task."""
        return F.cross_entropy(self.logits(images)[:, self.first :], labels - self.first)
