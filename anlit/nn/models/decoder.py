"""The skeleton that the three architectures share: embed → blocks → head, and the hook that restores norms.

Shape letters, used across this folder: B batch, T context length, d = d_model, H heads of queries, G = n_kv_heads
heads of keys and values, D = d_head, f = d_ff, V vocabulary. A linear map is W of shape (out, in); a "row" is the
weights of one output.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from anlit.nn.attention.cache import KeyValueCache
from anlit.nn.attention.output import GateMap
from anlit.nn.attention.qk_clip import QKClip
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import linear_cross_entropy
from anlit.nn.layers.linear import ScaledLinear, TokenEmbedding
from anlit.nn.layers.norms import Part, RMSNorm, restore_norms
from anlit.nn.layers.positions import Positions, Rotation
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.layers.sharded import fill
from anlit.nn.mechanisms.coefficient import Coefficient, shared_coefficients
from anlit.nn.mechanisms.warm_start import WarmStart
from anlit.nn.models.config import DecoderConfig


class Decoder(nn.Module):
    """tokens (B, T) → logits (B, T, V). Subclasses add `output`, the initial values and, if any, the constraint."""

    block_class: Callable[[Any, int], nn.Module]
    """Called with the settings and a layer's number, from 0."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        positions = config.positions.for_context(config.context_length)
        config = replace(
            config, attention=copy.deepcopy(config.attention), positions=positions
        )  # this model's own
        assert config.vocab_size is not None  # the configuration refuses it
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model)
        self.blocks: Any = nn.ModuleList(
            self.block_class(config, layer) for layer in range(config.n_layers)
        )
        self.shared_coefficients = nn.ModuleList(shared_coefficients(self.blocks))
        self.head = ScaledLinear(config.d_model, config.vocab_size)
        self.tie_embeddings = config.tie_embeddings
        self._tie()
        self.document_masking = config.document_masking
        self.compiles_loss = self.compiles_norms = False
        self._given: dict[str, Tensor] = {}

    def _tie(self) -> None:
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, document_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
        longest: int | None = None, targets: Tensor | None = None, z_loss: float = 0.0,
        cache: KeyValueCache | None = None, n_logits: int | None = None,
    ) -> Any:  # fmt: skip
        """Logits (B, T, V) for tokens (B, T); or with `targets` the loss and the objective, without all logits.

        Args:
            tokens: Token ids.
            document_ids: (B, T), equal for tokens of one document.
            cu_seqlens: Where the documents begin, as in a `Batch`; without it some kernels wait for the device.
            longest: Tokens of the longest document, as in a `Batch`.
            targets: (B, T), −100 where a token does not count. The result is then that of `linear_cross_entropy`.
            z_loss: Weight of the squared log-partition in the objective.
            cache: The keys and values of earlier tokens; those of these tokens are added to it.
            n_logits: Compute the logits of only this many last tokens, (B, n_logits, V).
        """
        ids = document_ids if self.document_masking else None
        if cache is None:
            documents = Documents(ids, tokens.shape[1], tokens.device, cu_seqlens, longest)
        else:
            documents = cache.read(tokens.shape[1], ids, tokens.device)
        h = self.embedding(tokens)
        for (
            block
        ) in self.blocks:  # before the first block, so that compiled blocks all see the same state
            block.attention.prepare(documents, h)
        rotations = self.rotations(documents, h)
        for block in self.blocks:
            h = block(h, documents, rotations[block.positions])
        if targets is None:
            return self.logits(h if n_logits is None else h[:, -n_logits:])
        x, scale = self.output(h)
        return linear_cross_entropy(x, self.head.scaled(scale), targets, z_loss, self.compiles_loss)

    def rotations(self, documents: Documents, h: Tensor) -> dict[Positions, Rotation | None]:
        """The rotation of this batch for each kind of positions in the blocks, computed once for all layers."""
        kinds = {block.positions: block.d_head for block in self.blocks}
        return {
            positions: positions.rotation(
                d_head, documents.max_length, documents.rotary_positions, h
            )
            for positions, d_head in kinds.items()
        }

    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight matrix with the name of its map: embedding, head, and each block's W_q … W_d."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                weight: Any = module.weight
                yield name.rsplit(".", 1)[-1], weight

    def logits(self, h: Tensor) -> Tensor:
        """The last hidden state (B, T, d) → (B, T, V)."""
        x, scale = self.output(h)
        return self.head(x, scale)

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """The last hidden state (B, T, d) → the head's input (B, T, d), and factors of its rows (V,), None for 1."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all initial values, which the subclass's docstring lists. Gates W_g start at 0.

        On the meta device nothing is drawn; `draw_missing` draws the same values later.
        """
        if self.embedding.weight.is_meta:
            self._random_state = torch.get_rng_state()
            return
        for name, weight in self.matrices():
            if name != "W_g":
                fill(weight, partial(self.draw, name))
        for module in self.modules():
            if isinstance(
                module, RMSNorm | ScalingVector | Coefficient | GateMap | QKClip | WarmStart
            ):
                module.reset_parameters()

    def draw_missing(self, device: torch.device) -> None:
        """Give a decoder that was built on the meta device its initial values, on `device`. Others do not change."""
        if self.embedding.weight.is_meta:
            self.to_empty(device=device)  # this makes two parameters of one that two modules share
            self._tie()
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._random_state)
                self.reset_parameters()
            self.begin_from(self._given)
            self._given = {}

    def begin_from(self, weights: dict[str, Tensor]) -> None:
        """Take `weights`, by their names in the state_dict, in place of drawn ones.

        The meta device has no memory for them, so there they are kept for `draw_missing`.
        """
        if self.embedding.weight.is_meta:
            self._given = weights
            return
        own = self.state_dict()
        for name, values in weights.items():
            fill(own[name], methodcaller("copy_", values))

    def complete(self) -> None:
        """Add what no state_dict has to a decoder on the meta device whose weights were assigned."""
        self._tie()
        for module in self.modules():
            if isinstance(module, QKClip):  # its state is not saved
                module.to_empty(device="cpu")
                module.reset_parameters()

    def draw(self, name: str, weight: Tensor) -> None:
        """Fill one matrix with its initial values, without gradients; `name` is that of its map."""
        raise NotImplementedError

    def clip_qk(self) -> None:
        """Shrink queries and keys where a score was too large (QK-clip); called once after each optimizer step."""
        if clips := [
            block.attention.clip for block in self.blocks if block.attention.clip is not None
        ]:
            for block, factors in zip(self.blocks, QKClip.factors(clips), strict=True):
                block.shrink_qk(factors)

    def restore_norms(self) -> None:
        """Bring the weights back to the architecture's constraint; called once after each optimizer step."""

    def row_norms(self) -> Iterable[Tensor]:
        """The norms of all constrained vectors but the gates', one 1-d tensor per matrix; none for GPT+.

        They are in float32 at least.
        """
        return ()

    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def cache_bytes(self, length: int, element_size: int) -> int:
        """Bytes of a `KeyValueCache` for one row of `length` tokens: 2·G·D numbers a token in every layer."""
        windows = (
            (block.n_kv_heads * block.d_head, block.attention.mechanism.window)
            for block in self.blocks
        )
        numbers = sum(
            2 * width * (length if window is None else min(length, 2 * window))
            for width, window in windows
        )
        return numbers * element_size


class NormalisedDecoder(Decoder):
    """What nGPT and anGPT share: the vectors of every matrix are drawn uniformly on the sphere, and `norms` holds.

    The gates W_g start at 0, so they cannot have norm 1. Their rows are bounded (our choice).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norms = config.norms
        init = math.sqrt(config.d_model) if config.s_z_init is None else config.s_z_init
        self.s_z = config.scaling(self.head.out_features, init, config.s_z_scale)
        self.reset_parameters()

    def axis(self, name: str) -> int:
        """The axis of a matrix along which its vectors lie, by default rows; `name` is that of its map."""
        return 1

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return h, self.s_z()

    def draw(self, name: str, weight: Tensor) -> None:
        weight.normal_()
        weight.div_(torch.linalg.vector_norm(weight, dim=self.axis(name), keepdim=True))

    def restore_norms(self) -> None:
        parts: list[Part] = [
            (weight, self.axis(name), "bounded" if name == "W_g" else self.norms)
            for name, weight in self.matrices()
        ]
        restore_norms(parts, self.compiles_norms)

    def row_norms(self) -> Iterator[Tensor]:
        weights = (
            (weight.detach(), self.axis(name)) for name, weight in self.matrices() if name != "W_g"
        )
        for weight, axis in weights:
            yield torch.linalg.vector_norm(weight, dim=axis, dtype=wide_dtype(weight))


def split_heads(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side, (B, T, (H + 2G)·D) → q (B, H, T, D), k and v (B, G, T, D)."""
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    return qkv.unflatten(-1, (sum(sizes), -1)).transpose(1, 2).split(sizes, dim=1)
