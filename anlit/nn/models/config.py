"""The settings that architectures share, each written once.

A field here is a key of `model.init_args` in YAML and an argument of `GPT`, `NGPT` and `AnGPT`.
Each architecture adds its settings in its file.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import nn

from anlit.config.object_checks import check_objects_of
from anlit.config.objects import lazy_default, made_real
from anlit.config.value_checks import check_ranges
from anlit.errors import UserError
from anlit.nn.attention.attention import Attention, KernelChoice
from anlit.nn.attention.output import AttentionOutput, Gate
from anlit.nn.layers.positions import Positions, RoPE
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.plain import Plain
from anlit.nn.models.runtime import Runtime


@dataclass(frozen=True)
class DecoderConfig:
    """Settings of a decoder.

    The norms that can be switched on are of the architecture's kind. GPT+ has RMS with a learned
    gain. nGPT and anGPT have the unit norm.

    Args:
        vocab_size: V, the number of tokens. By default `anlit fit` takes the data's number, rounded
            up to a multiple of 128.
        context_length: T, tokens in a training sequence.
        n_layers: L, the number of blocks.
        n_heads: H, attention heads.
        n_kv_heads: G, heads of keys and values (arXiv 2305.13245). Each is shared by H/G heads of
            queries. It must divide n_heads, its default.
        d_head: D, the width of a head. By default d_model/n_heads, which must then be a whole
            number. H·D may differ from d_model.
        d_model: d, the width of the hidden state.
        d_ff: f, the width of the MLP. By default 4·d_model.
        attention: The attention mechanism.
        positions: RoPE, LinearRoPE, Llama3RoPE, YaRN, DynamicNTK, PRoPE, NoPE, or a
            PositionsPattern.
        document_masking: Let a token attend only within its own document.
        kernel: The attention kernel; auto follows the table in docs/attention.md.
        tie_embeddings: Let the head be the embedding's matrix. GPT+ only, for a reason in
            docs/train.md.
        qk_norm: Normalise queries and keys per head.
        qk_norm_gain: Whether QK-norm has a learned gain. By default GPT+ and nGPT (s_qk) have a
            gain. anGPT, as we read its paper, does not.
        qk_norm_eps: ε of the QK-norm. With a large ε, q and k keep some of their norm. In nGPT and
            anGPT it is a multiple of their usual mean square, 1/d_model and 1/d_head. By default
            norm_eps in GPT+, 0 in nGPT, and d_head·norm_eps in anGPT. anGPT adds norm_eps to the
            mean square.
        qk_clip: The largest score q·k/√D (arXiv 2507.20534). After a step with a larger score, q
            and k of its head shrink. Null for never. It costs a second product q·kᵀ.
        v_norm: Normalise values per head too (QKV-norm, arXiv 2410.16682).
        attention_norm: Normalise each head's weighted average of the values.
        attention_gate: Multiply the averages by 2σ(W_g x) (arXiv 2505.06708). There is a factor per
            head or per element. W_g starts at 0.
        post_norm: Normalise the outputs of W_o and W_d (peri-LN, arXiv 2502.02732). nGPT always
            does.
        dropout: Dropout probability of the attention weights and of each block's two updates.
        z_loss: Weight of the mean squared log-partition of the output softmax in the training loss.
        base_d_model: The width at which the rates were tuned. Initial values and rates follow the
            rule of `anlit.nn.models.transfer` from there. Null for no rule.
        base_n_layers: The depth at which the rates were tuned, with the same rule. Null for no
            rule over depth.
        runtime: Compiled blocks, activation checkpointing, late initial values, float8.
    """

    vocab_size: int | None = None
    context_length: int = 2048
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_model: int = 768
    d_ff: int | None = None
    attention: Mechanism = lazy_default(Plain)
    positions: Positions = lazy_default(RoPE, fraction=0.5)
    document_masking: bool = True
    kernel: KernelChoice = "auto"
    tie_embeddings: bool = False
    qk_norm: bool = True
    qk_norm_gain: bool | None = None
    qk_norm_eps: float | None = None
    qk_clip: float | None = None
    v_norm: bool = False
    attention_norm: bool = False
    attention_gate: Gate = "none"
    post_norm: bool = False
    dropout: float = 0.0
    z_loss: float = 0.0
    base_d_model: int | None = None
    base_n_layers: int | None = None
    runtime: Runtime = Runtime()

    def __post_init__(self) -> None:
        check_ranges("model", self)
        object.__setattr__(self, "attention", made_real(self.attention))
        object.__setattr__(self, "positions", made_real(self.positions))
        check_objects_of("model", self)
        if self.vocab_size is None:
            raise UserError(
                "vocab_size is not given: set it to the number of tokens of the data's vocabulary"
            )
        if self.d_head is None and self.d_model % self.n_heads:
            raise UserError(
                f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}: "
                f"choose a d_model that is a multiple of {self.n_heads}, or another n_heads, "
                "or set d_head"
            )
        if self.n_heads % self.kv_heads:
            raise UserError(
                f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads}: "
                f"choose a divisor of {self.n_heads}"
            )
        if self.attention_gate not in get_args(Gate):  # Python does not read annotations
            raise UserError(
                f"model.attention_gate={self.attention_gate} is not known: "
                f"choose {', '.join(get_args(Gate))}"
            )

    @property
    def head_width(self) -> int:
        """D, the width of a head: `d_head` or its default."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def kv_heads(self) -> int:
        """G, the heads of keys and values: `n_kv_heads` or its default."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def width_ratio(self) -> float:
        """m, how many times as wide as its base the model is; 1 without a base."""
        return 1.0 if self.base_d_model is None else self.d_model / self.base_d_model

    @property
    def depth_ratio(self) -> float:
        """l, how many times as deep as its base the model is; 1 without a base."""
        return 1.0 if self.base_n_layers is None else self.n_layers / self.base_n_layers

    @property
    def mlp_width(self) -> int:
        """f, the width of the MLP: `d_ff` or its default."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def attention_of(self, layer: int, can_shrink: bool) -> Attention:
        """Build the attention of layer number `layer`, from 0.

        Args:
            layer: The number of the layer.
            can_shrink: Whether q and k have a factor that QK-clip can make smaller, a matrix or a
                gain.

        Raises:
            UserError: Positions, kernel or QK-clip do not fit.
        """
        if self.qk_clip is not None and not can_shrink:
            raise UserError(
                "model.qk_clip has nothing to shrink, because the QK-norm has no learned gain "
                "here: set model.qk_norm_gain: true, or leave qk_clip out"
            )
        try:
            self.positions.check(self.head_width)
            mechanism = self.attention.for_layer(self.n_heads, self.head_width, layer)
            # A user's `for_layer` need not set these.
            mechanism.n_heads = self.n_heads
            mechanism.d_head = self.head_width
            return Attention(mechanism, self.kernel, self.dropout, self.qk_clip)
        except ValueError as error:
            raise UserError(f"model: {error}") from error

    def attention_output(self, norm: nn.Module, gate_factor: float) -> AttentionOutput:
        """Build the gate between attention and W_o, with `norm` if `attention_norm` is on."""
        return AttentionOutput(
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_head=self.head_width,
            gate=self.attention_gate,
            gate_factor=gate_factor,
            norm=norm if self.attention_norm else None,
        )


@dataclass(frozen=True)
class NormalisedConfig(DecoderConfig):
    """Settings that nGPT and anGPT share.

    Each scaling vector has an initial value and a scale, by default 1/√d_model. The scale sets how
    fast the vector learns relative to the matrices. With a base the default is 1/√base_d_model.
    A null initial value becomes its number, which checkpoints then have: without it the stored
    vector has no meaning.

    Args:
        alpha_init: Initial step size α of both residual updates. If null it is 1/n_layers in nGPT
            and half of it in anGPT. A number is the base's, and is divided by
            n_layers/base_n_layers.
        alpha_scale: The scale of α. By default 1/√d_model, or 1/√base_d_model.
        s_z_init: Initial scale of the logits; √d_model if null, which gives them variance 1 at the
            start. A number is the base's, and is multiplied by √(d_model/base_d_model).
        s_z_scale: The scale of s_z. By default 1/√d_model, or 1/√base_d_model.
    """

    default_alpha_sum: ClassVar[float] = 1.0
    """The sum of the layers' α, of one kind of update, if `alpha_init` was null."""
    alpha_init: float | None = None
    alpha_scale: float | None = None
    s_z_init: float | None = 1.0
    s_z_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_embeddings:
            raise UserError(
                "model.tie_embeddings is for GPT+ only, because the h of nGPT and anGPT begins as "
                "its token's unit row and keeps most of it, so that a tied head would predict the "
                "token that it reads: leave it out"
            )
        if self.alpha_init is None:
            alpha_init = self.default_alpha_sum / (self.base_n_layers or self.n_layers)
            object.__setattr__(self, "alpha_init", alpha_init)
        if self.s_z_init is None:
            s_z_init = math.sqrt(self.base_d_model or self.d_model)
            object.__setattr__(self, "s_z_init", s_z_init)

    def alpha(self) -> ScalingVector:
        """The step size of a residual update, (d,)."""
        assert self.alpha_init is not None, "__post_init__ sets it"
        init = self.alpha_init / self.depth_ratio
        return self.scaling(self.d_model, init, self.alpha_scale)

    def logit_scale(self) -> ScalingVector:
        """s_z, the scale of the logits, (V,)."""
        assert self.vocab_size is not None, "the configuration refuses it"
        assert self.s_z_init is not None, "__post_init__ sets it"
        init = self.s_z_init * math.sqrt(self.width_ratio)
        return self.scaling(self.vocab_size, init, self.s_z_scale)

    def scaling(self, width: int, init: float, scale: float | None) -> ScalingVector:
        """A scaling vector (width,); a `scale` of None is the default."""
        if scale is None:
            scale = 1 / math.sqrt(self.base_d_model or self.d_model)
        return ScalingVector(width, init, scale)
