"""anlit's models for transformers: GPT+, nGPT and anGPT with their positions and mechanisms.

It needs torch and transformers but not anlit. nGPT and anGPT are folded: factors of a matrix's rows
are in the matrix. Shape letters as in `attention_anlit.py`; d is the width of the hidden state, V
the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention_anlit import TokenPositions, attend, count_positions, rotate, separate_documents

UNSUPPORTED_FLAGS = ("output_attentions", "output_hidden_states")
"""Flags of a configuration for outputs that this code does not return."""
IGNORED_ARGUMENTS = ("cache_position", "tokenizer")
"""Arguments of `generate` that reach the model and change no logit.

Before transformers 5.24 cache_position repeats what the cache has. The tokenizer is for
stop_strings.
"""


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis."""
    x_float = x.float()
    norm = torch.linalg.vector_norm(x_float, dim=-1, keepdim=True)
    return (x_float / norm.clamp_min(torch.finfo(torch.float32).tiny)).to(x.dtype)


class UnitNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return unit(x)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · gain over the last axis."""

    def __init__(self, width: int, eps: float, has_gain: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width)) if has_gain else None

    def forward(self, x: Tensor) -> Tensor:
        gain = None if self.gain is None else self.gain.float()
        return rms_norm(x.float(), (self.width,), gain, self.eps).to(x.dtype)


class AttentionOutput(nn.Module):
    """The input of W_o, (B, T, H·D): the joined averages of the heads, with norm and gate."""

    def __init__(self, config: Any, norm: nn.Module) -> None:
        super().__init__()
        self.n_heads = config.num_attention_heads
        self.norm = norm
        n_gates = 0
        if config.gate == "per_head":
            n_gates = self.n_heads
        elif config.gate == "per_element":
            n_gates = self.n_heads * config.head_dim
        self.W_g = nn.Linear(config.hidden_size, n_gates, bias=False) if n_gates else None

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        attended = self.norm(attended)
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))
            attended = attended * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return attended.transpose(1, 2).flatten(2)


class AnlitConfig(PretrainedConfig):
    """Sizes under transformers' names, mechanisms and rotations, and settings of the blocks.

    `mechanisms` has the mechanism of each layer. `positions` has the number of each layer's
    rotation in `rotations`.

    Each architecture has a subclass, because transformers finds the model by the class of its
    configuration.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  # for the Trainer

    vocab_size: int = 50_304
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 0
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    max_position_embeddings: int = 2048
    mechanisms: Any = None
    positions: Any = None
    rotations: Any = None
    qk_norm: dict[str, Any] | None = None
    norm_eps: float = 1e-6
    v_norm: bool = False
    output_norm: bool = False
    post_norm: bool = False
    gate: str = "none"
    use_cache: bool = True
    tie_word_embeddings: bool = False


class AnlitBlock(GradientCheckpointingLayer):
    """The maps of a block, and the mechanism and rotation of its layer.

    `make_norm` makes the norm of a head's values, and of its output.
    """

    def __init__(
        self, config: AnlitConfig, layer: int, make_norm: Callable[[], nn.Module] = UnitNorm
    ) -> None:
        super().__init__()
        self.layer = layer
        self.d_head = config.head_dim
        self.mechanism = config.mechanisms[layer]
        self.rotation = config.rotations[config.positions[layer]]
        d = config.hidden_size
        d_ff = config.intermediate_size
        d_q = config.head_dim * config.num_attention_heads
        d_kv = config.head_dim * config.num_key_value_heads
        self.W_q = nn.Linear(d, d_q, bias=False)
        self.W_k = nn.Linear(d, d_kv, bias=False)
        self.W_v = nn.Linear(d, d_kv, bias=False)
        self.W_o = nn.Linear(d_q, d, bias=False)
        self.W_u = nn.Linear(d, d_ff, bias=False)
        self.W_z = nn.Linear(d, d_ff, bias=False)
        self.W_d = nn.Linear(d_ff, d, bias=False)
        self.norm_v = make_norm() if config.v_norm else nn.Identity()
        self.output = AttentionOutput(config, make_norm() if config.output_norm else nn.Identity())
        self.norm_q: nn.Module = nn.Identity()
        self.norm_k: nn.Module = nn.Identity()
        if config.qk_norm:
            eps = config.qk_norm["eps"]
            has_gain = config.qk_norm["gain"]
            self.norm_q = RMSNorm(self.d_head, eps, has_gain)
            self.norm_k = RMSNorm(self.d_head, eps, has_gain)

    def rotate_and_normalise(self, q: Tensor, k: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise q and k, then rotate them for positions `index` (B, T)."""
        rotated_q = rotate(self.norm_q(q), self.rotation, index)
        rotated_k = rotate(self.norm_k(k), self.rotation, index)
        return rotated_q, rotated_k

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        """W_o · Attn(q, k, v) of h (B, T, d), after the keys and values of the cache."""
        q = self.split_heads(self.W_q(h))
        k = self.split_heads(self.W_k(h))
        v = self.split_heads(self.W_v(h))
        q, k = self.rotate_and_normalise(q, k, tokens.queries)
        v = self.norm_v(v)
        if past is not None:
            k, v = past.update(k, v, self.layer, {"cache_position": tokens.slots})
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, heads·D) → (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(self.W_u(h) * silu(self.W_z(h)))


class AnlitForCausalLM(PreTrainedModel, GenerationMixin):
    """tokens (B, T) → logits (B, T, V). A subclass names its block."""

    block_class: Any
    has_final_norm = False
    keeps_embedding_norm = True
    """Whether the architecture sets or bounds the norm of h by the norm of its embedding."""
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012  # if tie_word_embeddings
    _no_split_modules = ["GPTBlock", "NGPTBlock", "AnGPTBlock"]  # noqa: RUF012  # by device_map
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: AnlitConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            self.block_class(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm_f = (
            RMSNorm(config.hidden_size, config.norm_eps) if self.has_final_norm else nn.Identity()
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.head = new_embeddings

    @torch.no_grad()
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as in transformers. New rows of nGPT and anGPT get the mean norm of old rows."""
        old_norms = torch.linalg.vector_norm(self.embedding.weight.float(), dim=-1)
        embedding = super().resize_token_embeddings(*args, **kwargs)
        new_rows = embedding.weight[len(old_norms) :]
        if self.keeps_embedding_norm and len(new_rows):
            new_rows.copy_(unit(new_rows.float()) * old_norms.mean())
        return embedding

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """The mask that generate gives to `forward` with a static cache: the (B, S) mask."""
        return attention_mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), and the loss of the next tokens if there are `labels` (B, T).

        Positions count the tokens that `attention_mask` (B, S) keeps, so batches may be padded.
        Without mask and cache, a document begins wherever `position_ids` (B, T) do not go up by 1.
        The cache is the argument `cache` from transformers 5.24 on, `past_key_values` in earlier
        versions.

        Raises:
            ValueError: An argument asks for something that this code does not do.
        """
        past = options.pop("cache", None) if past_key_values is None else past_key_values
        for name in IGNORED_ARGUMENTS:
            options.pop(name, None)
        loss_options = {
            "num_items_in_batch": options.pop("num_items_in_batch", None),
            "shift_labels": options.pop("shift_labels", None),
        }
        self.check_arguments(attention_mask, past, options)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "input_ids and inputs_embeds are both given, or neither is: give either of them"
            )
        h = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        wants_cache = self.config.use_cache if use_cache is None else use_cache
        is_recomputed = any(_recomputes_activations(block) for block in self.blocks)
        if is_recomputed and torch.is_grad_enabled():
            # The second forward pass would fill the cache again.
            past = None
            wants_cache = False
        if past is None and attention_mask is None and position_ids is not None:
            tokens = separate_documents(position_ids.expand(len(h), -1))
            is_packed = wants_cache and not tokens.visible[:, 0, -1, 0].all()
            if is_packed and use_cache:
                raise ValueError(
                    "use_cache is not supported for packed documents, whose position_ids restart: "
                    "leave it out"
                )
            wants_cache = wants_cache and not is_packed
        else:
            tokens = count_positions(h, attention_mask, position_ids, past)
        if past is None and wants_cache:
            past = DynamicCache()
        for block in self.blocks:
            h = block(h, tokens, past)
        is_count = isinstance(logits_to_keep, int)
        h = h[:, -logits_to_keep:] if is_count else h[:, logits_to_keep]
        logits = self.head(self.norm_f(h))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **loss_options)
        return CausalLMOutputWithPast(loss, logits, past)

    def check_arguments(
        self, attention_mask: Tensor | None, past: Any, options: dict[str, Any]
    ) -> None:
        """Raise ValueError if arguments or flags of the configuration are not supported."""
        flags = {name: getattr(self.config, name, None) for name in UNSUPPORTED_FLAGS}
        for name, value in (flags | options).items():
            if value is not None and value is not False:
                raise ValueError(f"{name} is not supported by this model: leave it out")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                "attention_mask must be of shape (batch, tokens): for packed documents give "
                "position_ids that restart instead"
            )
        if past is not None and not isinstance(past, Cache):
            raise ValueError(
                "past_key_values must be a Cache of transformers: give, for example, DynamicCache()"
            )


def _recomputes_activations(block: Any) -> bool:
    return block.gradient_checkpointing and block.training


class GPTConfig(AnlitConfig):
    model_type = "anlit_gpt"


class GPTBlock(AnlitBlock):
    """GPT+ with settings that no architecture of transformers has.

    h ← h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁
                                       q, k → rms·gain → RoPE
    h ← h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
    logits = W_head (rms(h)·g_f)
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        d = config.hidden_size
        eps = config.norm_eps
        super().__init__(config, layer, partial(RMSNorm, config.head_dim, eps))
        self.norm_1 = RMSNorm(d, eps)
        self.norm_2 = RMSNorm(d, eps)
        self.post_norm_A = RMSNorm(d, eps) if config.post_norm else nn.Identity()
        self.post_norm_M = RMSNorm(d, eps) if config.post_norm else nn.Identity()

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = h + self.post_norm_A(self.attend(self.norm_1(h), tokens, past))
        return h + self.post_norm_M(self.mlp(self.norm_2(h)))


class GPTForCausalLM(AnlitForCausalLM):
    config_class = GPTConfig
    block_class = GPTBlock
    has_final_norm = True
    keeps_embedding_norm = False


class NGPTConfig(AnlitConfig):
    model_type = "anlit_ngpt"


class NGPTBlock(AnlitBlock):
    """nGPT (arXiv 2410.01131), folded: s_u, √d s_v and s_z are in the matrices.

    q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head
    h ← unit(h + α_A ∘ (unit(W_o · Attn(q, k, v)) − h))
    h ← unit(h + α_M ∘ (unit(W_d (u ∘ SiLU(z))) − h))      u = W_u h, z = W_z h
    logits = W_head h
    """

    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
        self.alpha_A = nn.Parameter(torch.ones(d))
        self.alpha_M = nn.Parameter(torch.ones(d))
        self.s_qk = nn.Parameter(torch.ones(self.W_q.out_features))
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm:
            eps = config.qk_norm["eps"]
            self.norm_qk = RMSNorm(self.d_head, eps, has_gain=False) if eps else UnitNorm()

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = self.step(h, self.attend(h, tokens, past), self.alpha_A)
        return self.step(h, self.mlp(h), self.alpha_M)

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """unit(h + α ∘ (unit(suggestion) − h)), in the precision of h also under autocast."""
        return unit(torch.lerp(h, unit(suggestion).to(h.dtype), alpha.to(h.dtype)))

    def rotate_and_normalise(self, q: Tensor, k: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k for positions `index` (B, T), normalise and scale them."""
        q = self.norm_qk(rotate(q, self.rotation, index))
        k = self.norm_qk(rotate(k, self.rotation, index))
        s_qk = self.s_qk.view(-1, 1, self.d_head)
        if q.shape == k.shape:
            return (q * s_qk).to(q.dtype), (k * s_qk).to(k.dtype)
        # Heads share keys, but each has its own s_qk: queries take the factor of both.
        return (q * s_qk.square()).to(q.dtype), k


class NGPTForCausalLM(AnlitForCausalLM):
    config_class = NGPTConfig
    block_class = NGPTBlock


class Residual(nn.Module):
    """h, suggestion → w_h ∘ h + suggestion, or + w_s ∘ suggestion."""

    def __init__(self, d_model: int, weighs_suggestion: bool) -> None:
        super().__init__()
        self.h = nn.Parameter(torch.ones(d_model))
        self.suggestion = nn.Parameter(torch.ones(d_model)) if weighs_suggestion else None

    def forward(self, h: Tensor, suggestion: Tensor) -> Tensor:
        if self.suggestion is not None:
            suggestion = self.suggestion * suggestion
        return torch.addcmul(suggestion, self.h, h)


class AnGPTConfig(AnlitConfig):
    model_type = "anlit_angpt"


class AnGPTBlock(AnlitBlock):
    """anGPT (arXiv 2505.22014), folded: constants, α and s_z are in the matrices.

        h ← w_A ∘ h + W_o · Attn(q, k, v)          q, k, v = W h;  q, k → rms → RoPE
        h ← w_M ∘ h + W_d (u ∘ SiLU(z))            u = W_u h, z = W_z h
        logits = W_head h

    With a post-norm the suggestions are unit vectors and are multiplied by w_s.
    """

    def __init__(self, config: AnGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
        self.alpha_A = Residual(d, config.post_norm)
        self.alpha_M = Residual(d, config.post_norm)
        self.post_norm = UnitNorm() if config.post_norm else nn.Identity()

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = self.alpha_A(h, self.post_norm(self.attend(h, tokens, past)))
        return self.alpha_M(h, self.post_norm(self.mlp(h)))


class AnGPTForCausalLM(AnlitForCausalLM):
    config_class = AnGPTConfig
    block_class = AnGPTBlock
