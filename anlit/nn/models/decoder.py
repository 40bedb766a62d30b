"""The skeleton of the three architectures: embed → blocks → head, and the hook that restores norms.

Shapes: B batch, T tokens, d model width, H heads of queries, G heads of keys and values.
D head width, f MLP width, V vocabulary. A linear map is W of shape (out, in); a "row" has
the weights of one output.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from anlit.nn.attention.cache import KeyValueCache
from anlit.nn.attention.qk_clip import QKClip
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import linear_cross_entropy
from anlit.nn.layers.linear import ScaledLinear, TokenEmbedding
from anlit.nn.layers.norms import Constraint, Norms, restore_norms
from anlit.nn.layers.positions import Positions, Rotation
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import fill
from anlit.nn.mechanisms.coefficient import shared_coefficients
from anlit.nn.models.config import DecoderConfig
from anlit.nn.models.runtime import draws_matrices
from anlit.nn.models.transfer import NU_GPT, Rule, Transfer
from anlit.nn.models.unset_values import mark_unset, refuse_unset


class Decoder(nn.Module):
    """tokens (B, T) → logits (B, T, V).

    Subclasses add `output`, initial values and, if any, the constraint.
    """

    block_class: Callable[[Any, int], nn.Module]
    """Called with the settings and a layer's number, from 0."""
    transfer_rules: dict[str, Rule] = {}  # noqa: RUF012
    """How the rate of each parameter group follows the size."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # The configuration may be shared by models. This model's mechanism and positions are
        # copies.
        config = replace(
            config,
            attention=copy.deepcopy(config.attention),
            positions=config.positions.for_context(config.context_length),
        )
        assert config.vocab_size is not None, "the configuration refuses it"
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model)
        blocks = [self.block_class(config, layer) for layer in range(config.n_layers)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.shared_coefficients = nn.ModuleList(shared_coefficients(self.blocks))
        self.head = ScaledLinear(config.d_model, config.vocab_size)
        self.tie_embeddings = config.tie_embeddings
        self.tie_head()
        self.document_masking = config.document_masking
        self.transfer = Transfer(
            rules=self.transfer_rules,
            width=config.width_ratio,
            depth=config.depth_ratio,
            base_d_model=config.base_d_model,
            base_n_layers=config.base_n_layers,
        )
        self.compiles_loss = False
        self.compiles_norms = False
        self._later_weights: dict[str, Tensor] = {}

    def tie_head(self) -> None:
        """Let the head be the embedding's matrix, if the settings say so."""
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
        cache: KeyValueCache | None = None,
        n_logits: int | None = None,
    ) -> Any:
        """Logits (B, T, V) for tokens (B, T).

        Or with `targets` the loss and the objective, without all logits.

        Args:
            tokens: Token ids.
            document_ids: (B, T), equal for tokens of one document.
            cu_seqlens: Where the documents begin, as in a `Batch`. Without it some kernels wait for
                the device.
            longest: Tokens of the longest document, as in a `Batch`.
            targets: (B, T), −100 where a token does not count. The result comes from
                `linear_cross_entropy`.
            z_loss: Weight of the squared log-partition in the objective.
            cache: The keys and values of earlier tokens, to which the keys and values of `tokens`
                are added.
            n_logits: Compute the logits of only this many last tokens, (B, n_logits, V).
        """
        ids = document_ids if self.document_masking else None
        if cache is None:
            documents = Documents(ids, tokens.shape[1], tokens.device, cu_seqlens, longest)
        else:
            documents = cache.read(tokens.shape[1], ids, tokens.device)

        # Embed: (B, T, d)
        h = self.embedding(tokens)

        # What the layers share, before the first block, so that all compiled blocks see the same
        # state
        for block in self.blocks:
            block.attention.prepare(documents, h)
        rotations = self.rotations(documents, h)

        # Attention and MLP of each layer: (B, T, d)
        for block in self.blocks:
            h = block(h, documents, rotations[block.positions])

        # Logits (B, T, V), or the loss with a chunk of logits at a time
        if targets is None:
            return self.logits(h if n_logits is None else h[:, -n_logits:])
        x, scale = self.output(h)
        return linear_cross_entropy(x, self.head.scaled(scale), targets, z_loss, self.compiles_loss)

    def rotations(self, documents: Documents, h: Tensor) -> dict[Positions, Rotation | None]:
        """The rotation of this batch for each kind of positions, once for all layers."""
        rotations: dict[Positions, Rotation | None] = {}
        for block in self.blocks:
            if block.positions not in rotations:
                rotations[block.positions] = block.positions.rotation(
                    block.d_head, documents.max_length, documents.rotary_positions, h
                )
        return rotations

    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weight matrices with the names of their maps: embedding, head, W_q … W_d."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                weight: Any = module.weight
                yield name.rsplit(".", 1)[-1], weight

    def logits(self, h: Tensor) -> Tensor:
        """The last hidden state (B, T, d) → (B, T, V)."""
        x, scale = self.output(h)
        return self.head(x, scale)

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """The last h (B, T, d) → the head's input (B, T, d), and a factor per row (V,) or None."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all initial values, which the subclass's docstring lists. Gates W_g start at 0.

        The meta device holds no values: there `draw_missing` draws the same values later.
        """
        if self.embedding.weight.is_meta:
            self._random_state = torch.get_rng_state()
            return
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        for name, weight in self.matrices():
            if name != "W_g" and draws_matrices():
                fill(weight, partial(self.draw, name))

    def draw_missing(self, device: torch.device) -> None:
        """Give a decoder that was built on the meta device its initial values, on `device`.

        Others do not change. Raises UserError if a parameter or buffer has no initial values,
        because the user's module that has it sets none in `reset_parameters`.
        """
        if not self.embedding.weight.is_meta:
            return
        self.to_empty(device=device)
        mark_unset(self)
        self.tie_head()  # `to_empty` makes two parameters of one that two modules share
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            self.reset_parameters()
        self.begin_from(self._later_weights)
        self._later_weights = {}
        refuse_unset(self)

    def begin_from(self, weights: dict[str, Tensor]) -> None:
        """Replace initial values by `weights`, named as in the state_dict.

        The meta device has no memory for them. So there they wait for `draw_missing`.
        """
        if self.embedding.weight.is_meta:
            self._later_weights = weights
            return
        state = self.state_dict()
        for name, values in weights.items():
            fill(state[name], methodcaller("copy_", values))

    def complete(self) -> None:
        """Add the state that no state_dict has, after weights were assigned to the meta device."""
        self.tie_head()
        for module in self.modules():
            if isinstance(module, QKClip):
                module.to_empty(device="cpu")
                module.reset_parameters()

    def draw(self, name: str, weight: Tensor) -> None:
        """Fill one matrix with its initial values, without gradients.

        `name` is the name of its map.
        """
        raise NotImplementedError

    def clip_qk(self) -> None:
        """Shrink queries and keys where a score was too large (QK-clip).

        Called once after each optimizer step.
        """
        clips = [block.attention.clip for block in self.blocks]
        if None in clips:
            return
        for block, factors in zip(self.blocks, QKClip.factors(clips), strict=True):
            block.shrink_qk(factors)

    def restore_norms(self) -> None:
        """Bring the weights back to the architecture's constraint.

        Called once after each optimizer step.
        """

    def constraints(self) -> list[Constraint]:
        """The constrained matrices, each with the axis of its vectors. None in GPT+."""
        return []

    def row_norms(self) -> Iterable[Tensor]:
        """The norms of all constrained vectors but the gates', a 1-d tensor per matrix.

        Nothing for GPT+.

        They are in float32 at least.
        """
        return ()

    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def cache_bytes(self, length: int, element_size: int) -> int:
        """Bytes of the keys and values that token number `length` sees, 2·G·D numbers for each."""
        n_numbers = 0
        for block in self.blocks:
            n_keys = min(length, block.attention.mechanism.window or length)
            n_numbers += 2 * block.n_kv_heads * block.d_head * n_keys
        return n_numbers * element_size


class NormalisedDecoder(Decoder):
    """The decoder of nGPT and anGPT: vectors are drawn uniformly on the sphere, and `norms` holds.

    The gates W_g start at 0. So they cannot have norm 1. Their rows are bounded (our choice).
    """

    transfer_rules = NU_GPT

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norms = config.norms
        self.s_z = config.logit_scale()
        self.reset_parameters()

    def axis(self, name: str) -> int:
        """The axis of a matrix along which its vectors lie, by default rows.

        `name` is the name of its map.
        """
        return 1

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return h, self.s_z()

    def draw(self, name: str, weight: Tensor) -> None:
        weight.normal_()
        weight.div_(torch.linalg.vector_norm(weight, dim=self.axis(name), keepdim=True))

    def constraints(self) -> list[Constraint]:
        constraints: list[Constraint] = []
        for name, weight in self.matrices():
            norms: Norms = "bounded" if name == "W_g" else self.norms
            constraints.append((weight, self.axis(name), norms))
        return constraints

    def restore_norms(self) -> None:
        restore_norms(self.constraints(), self.compiles_norms)

    def row_norms(self) -> Iterator[Tensor]:
        for name, weight in self.matrices():
            if name != "W_g":
                yield torch.linalg.vector_norm(
                    weight.detach(), dim=self.axis(name), dtype=wide_dtype(weight)
                )


def split_heads(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, ...]:
    """(B, T, (H + 2G)·D) → q (B, T, H, D), k and v (B, T, G, D)."""
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    return qkv.unflatten(-1, (sum(sizes), -1)).split(sizes, dim=2)


def heads_first(*vectors: Tensor) -> list[Tensor]:
    """(B, T, H, D) → (B, H, T, D), views: heads of a token stay side by side in memory.

    So the projections before and behind attention need no copies.
    """
    return [x.transpose(1, 2) for x in vectors]
