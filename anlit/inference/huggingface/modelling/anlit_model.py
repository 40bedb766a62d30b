"""The base of anlit's models for transformers: configuration, cache, embed → blocks → logits."""

from typing import Any

from torch import Tensor, nn
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


def attention_maps(config: AnlitConfig) -> tuple[nn.Linear, ...]:
    """W_q, W_k, W_v and W_o."""
    d, q, kv = (
        config.hidden_size,
        *(config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads)),
    )
    return tuple(nn.Linear(*shape, bias=False) for shape in ((d, q), (d, kv), (d, kv), (q, d)))


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """(B, T, H·D) → (B, H, T, D)."""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


class AnlitForCausalLM(PreTrainedModel, GenerationMixin):
    """tokens (B, T) → logits (B, T, V). A subclass makes the blocks and may override `final`."""

    _input_embed_layer = "embedding"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012  # if tie_word_embeddings
    _supports_sdpa = True

    def __init__(self, config: AnlitConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.make_block(config, layer) for layer in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def make_block(self, config: Any, layer: int) -> nn.Module:
        raise NotImplementedError

    def final(self, h: Tensor) -> Tensor:
        return h

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
        logits = self.head(self.final(h[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def with_past(past: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the cache followed by those of this call: (B, H, S, D)."""
    return (k, v) if past is None else past.update(k, v, layer)
