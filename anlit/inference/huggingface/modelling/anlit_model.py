"""The base of anlit's models for transformers: configuration, cache, embed → blocks → logits."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .anlit_attention import TokenPositions


class AnlitConfig(PretrainedConfig):
    """Sizes under transformers' names, mechanism and rotation of each layer, and settings of the blocks.

    `positions` has the number of each layer's rotation in `rotations`.

    Each architecture has a subclass, because transformers finds the model by the class of its configuration.
    """

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


class AnlitBlock(nn.Module):
    """The maps of a block, and what differs from layer to layer."""

    def __init__(self, config: AnlitConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.d_head = layer, config.head_dim
        self.mechanism, self.rotation = config.mechanisms[layer], config.rotations[config.positions[layer]]
        d, f = config.hidden_size, config.intermediate_size
        q, kv = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
        shapes = ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))
        maps = (nn.Linear(*shape, bias=False) for shape in shapes)
        self.W_q, self.W_k, self.W_v, self.W_o, self.W_u, self.W_z, self.W_d = maps

    def heads(self, h: Tensor) -> tuple[Tensor, ...]:
        """h (B, T, d) → q, k, v, each (B, heads, T, D)."""
        return tuple(W(h).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(self.W_u(h) * silu(self.W_z(h)))

    def with_past(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cache followed by those of this call: (B, H, S, D)."""
        return (k, v) if past is None else past.update(k, v, self.layer)


class AnlitForCausalLM(PreTrainedModel, GenerationMixin):
    """tokens (B, T) → logits (B, T, V). A subclass names its block and may override `final_norm`."""

    block_class: Any

    _input_embed_layer = "embedding"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012  # if tie_word_embeddings
    _supports_sdpa = True

    def __init__(self, config: AnlitConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.block_class(config, layer) for layer in range(config.num_hidden_layers))
        self.norm_f = self.final_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def final_norm(self, config: AnlitConfig) -> nn.Module:
        return nn.Identity()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **rest: Any,
    ) -> CausalLMOutputWithPast:
        """Positions count only tokens that `attention_mask` (B, S) keeps, so batches are padded on the left."""
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        n_seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        n_queries = input_ids.shape[1]
        tokens = TokenPositions(attention_mask, n_queries, n_seen + n_queries, input_ids.device)
        h = self.embedding(input_ids)
        for block in self.blocks:
            h = block(h, tokens, past_key_values)
        logits = self.head(self.norm_f(h[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
