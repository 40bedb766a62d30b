"""Position encodings: rotations of q and k, chosen apart from the attention mechanism.

Pairs are half-split as in Qwen3 and GPT-NeoX. Of the R rotated dimensions, dimension i is paired
with i + R/2. The other dimensions pass through. All classes here give a true rotation. So scores
depend on the distance alone. YaRN also makes the rotated dimensions longer by a constant.

Shapes: B batch, H heads, T tokens, D head width, R rotated width.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anlit.nn.layers.cpu_gradients import Rotate, is_trained_eagerly_on_cpu
from anlit.nn.layers.precision import wide_dtype


class Rotation(NamedTuple):
    """The rotation of a batch's queries and keys: x ↦ cos ∘ x + partner(sin ∘ x).

    `partner` exchanges the two dimensions of each pair. The tables are as wide as a head. So
    Inductor rotates in the pass that normalises, forward and backward.

    - cos: `scale` × cos of each token's angles for both dimensions of a pair, 1 for dimensions that
      do not rotate.
    - sin: `scale` × sin for the first dimension of a pair, −`scale` × sin for the second, 0 for
      dimensions that do not rotate.

    Both are (T, 1, D), or (B, T, 1, D) if positions restart in each document.
    """

    q: tuple[Tensor, Tensor]
    """cos and sin."""
    k: tuple[Tensor, Tensor]
    """A copy of them. If q and k read the same tables, Inductor first makes one pass of the
    gradients of their gains, and then reads dq and q again."""
    width: int
    """R."""


class Positions(nn.Module):
    """Base class.

    A subclass gives the angular frequency of each rotated pair, in radians per token.
    """

    @property
    def scale(self) -> float:
        """The factor of the rotated dimensions of queries and keys. Their scores get its square."""
        return 1.0

    def check(self, d_head: int) -> None:
        """Raise ValueError unless these positions can be used at head width `d_head`."""

    def for_context(self, context_length: int) -> "Positions":
        """The positions of a model that trains on sequences of `context_length` tokens."""
        return self

    def for_layer(self, layer: int) -> "Positions":
        """The positions of layer number `layer`, from 0."""
        return self

    def frequencies(self, d_head: int, length: int) -> Tensor:
        """Angular frequencies in radians per token, (R/2,) float64, for `length` tokens."""
        raise NotImplementedError

    def tables(self, d_head: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """scale × cos and sin of position × frequency, each (T, R/2), on the device of `like`.

        They are computed in float64. At 64k tokens a float32 product of position and frequency is
        off by 0.004 rad.
        """
        dtype = wide_dtype(like)
        positions = torch.arange(length, dtype=torch.float64)
        angles = torch.outer(positions, self.frequencies(d_head, length))
        cos = (self.scale * angles.cos()).to(like.device, dtype)
        sin = (self.scale * angles.sin()).to(like.device, dtype)
        return cos, sin

    def rotation(
        self, d_head: int, length: int, index: Tensor | None, like: Tensor
    ) -> Rotation | None:
        """The rotation of a batch's queries and keys, for all layers with these positions.

        None for no rotation.

        Args:
            d_head: D.
            length: Tokens of the whole sequence.
            index: (B or 1, T) integers, each token's position in its document. None for 0, 1 …
                length−1.
            like: A tensor with the device and precision of the rotation.
        """
        (cos, sin), k, width = self._whole_rotation(d_head, length, like)
        if index is None:
            return Rotation((cos, sin), k, width)
        return Rotation((cos[index], sin[index]), (cos[index], sin[index]), width)

    def _whole_rotation(self, d_head: int, length: int, like: Tensor) -> Rotation:
        """The rotation of positions 0, 1 … length−1, computed once for a length.

        It is made outside inference mode, so that training can use it after validation.
        """
        key = (d_head, length, like.device, wide_dtype(like))
        if getattr(self, "_key", None) != key:
            with torch.inference_mode(False):
                cos, sin = self.tables(d_head, length, like)
                width = 2 * cos.shape[-1]
                ones = cos.new_ones(length, d_head - width)
                zeros = sin.new_zeros(length, d_head - width)
                wide_cos = torch.cat((cos, cos, ones), dim=-1)[:, None]
                wide_sin = torch.cat((sin, -sin, zeros), dim=-1)[:, None]
                q = wide_cos, wide_sin
                k = wide_cos.clone(), wide_sin.clone()
                self._rotation = Rotation(q, k, width)
            self._key = key
        return self._rotation


def rotate(rotation: Rotation | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate and scale the pairs (i, i + R/2) of the first R dimensions of q and k.

    q is (B, T, H, D), k (B, T, G, D).
    """
    if rotation is None:
        return q, k
    width = rotation.width
    return _rotate(q, *rotation.q, width), _rotate(k, *rotation.k, width)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    if is_trained_eagerly_on_cpu(x) and x.dtype == cos.dtype:
        return Rotate.apply(x, cos, sin[..., : width // 2])
    wide = x.to(wide_dtype(x))
    return (cos * wide + _partner(sin * wide, width)).to(x.dtype)


def _partner(x: Tensor, width: int) -> Tensor:
    """Exchange dimensions i and i + R/2 of the first R dimensions of x, (B, T, H, D).

    The other dimensions of x are 0. So they may be exchanged too.
    """
    half = width // 2
    if x.shape[-1] % width == 0:
        return x.unflatten(-1, (-1, 2, half)).flip(-2).flatten(-3)  # a compiler makes no copy of it
    first, second, unrotated = x.split([half, half, x.shape[-1] - width], dim=-1)
    return torch.cat((second, first, unrotated), dim=-1)


class RoPE(Positions):
    """Rotary positions (arXiv 2104.09864) on a fraction of the head width.

    Args:
        fraction: Share of the head width that rotates, in (0, 1]; fraction × d_head must be an even
            number. [anGPT] uses 0.5; 1.0 is Qwen3's.
        base: Pair i of the R/2 rotated pairs turns by base^(−2i/R) radians per token.
    """

    smallest_width = 2
    """The smallest rotated width."""

    def __init__(self, fraction: float = 0.5, base: float = 10_000.0) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"RoPE's fraction must be in (0, 1], not {fraction}")
        self.fraction = fraction
        self.base = base
        _check_base(self, base)

    def check(self, d_head: int) -> None:
        width = self.fraction * d_head
        is_even = round(width) % 2 == 0 and math.isclose(width, round(width))
        if round(width) < self.smallest_width or not is_even:
            raise ValueError(
                f"positions.fraction={self.fraction:g} of d_head={d_head} rotates {width:g} "
                "dimensions, but the rotary width must be an even number of at least "
                f"{self.smallest_width}: choose another fraction or d_head"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        return _geometric_series(self.base, round(self.fraction * d_head))


def _check_base(positions: Positions, base: float) -> None:
    if not 1 < base < math.inf:
        name = type(positions).__name__
        raise ValueError(f"{name}'s base must be more than 1 and finite, not {base:g}")


def _geometric_series(base: float, width: int) -> Tensor:
    """base^(−2i/R) for i = 0 … R/2 − 1, R = `width`."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


class DynamicNTK(RoPE):
    """RoPE with a base that grows with the sequence: base·(T/T_train)^{R/(R−2)} for T > T_train.

    The fastest pair turns as in training. The slowest pair turns over T tokens as far as over
    T_train. So a longer sequence has only angles that the model was trained on. Up to T_train this
    is RoPE exactly.

    T is the length of the whole sequence, also if it packs several documents. Beyond T_train a
    document's logits depend on T.

    Args:
        fraction: As in RoPE. At least 4 dimensions must rotate.
        base: As in RoPE, up to the training length.
        training_length: T_train in tokens. None for the model's context_length. Set it if you raise
            context_length to evaluate on longer sequences.
    """

    smallest_width = 4

    def __init__(
        self, fraction: float = 0.5, base: float = 10_000.0, training_length: int | None = None
    ) -> None:
        super().__init__(fraction, base)
        self.training_length = training_length
        _check_stretch(self)

    def for_context(self, context_length: int) -> Positions:
        return DynamicNTK(self.fraction, self.base, self.training_length or context_length)

    def frequencies(self, d_head: int, length: int) -> Tensor:
        assert self.training_length is not None, "for_context names the training length"
        width = round(self.fraction * d_head)
        stretch = max(1.0, length / self.training_length)
        return _geometric_series(self.base * stretch ** (width / (width - 2)), width)


class LinearRoPE(RoPE):
    """RoPE with positions divided by a constant (position interpolation, arXiv 2306.15595).

    Args:
        factor: At least 1.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(self, factor: float, **rope: Any) -> None:
        super().__init__(**rope)
        self.factor = factor
        _check_stretch(self)

    def frequencies(self, d_head: int, length: int) -> Tensor:
        return super().frequencies(d_head, length) / self.factor


class Llama3RoPE(RoPE):
    """RoPE of Llama 3.1 and later: pairs of few turns over T_train tokens turn slower by `factor`.

    A pair of n turns keeps its frequency if n ≥ high_freq_factor. It is slower by `factor` if n ≤
    low_freq_factor. Between the two its frequency is interpolated by n.

    Args:
        factor: At least 1.
        training_length: T_train, tokens of a training sequence before the model was stretched.
        low_freq_factor: In turns.
        high_freq_factor: In turns, more than low_freq_factor.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(
        self,
        factor: float,
        training_length: int,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        **rope: Any,
    ) -> None:
        super().__init__(**rope)
        self.factor = factor
        self.training_length = training_length
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        _check_stretch(self)
        _check_order(self, "low_freq_factor", "high_freq_factor")

    def frequencies(self, d_head: int, length: int) -> Tensor:
        fast = super().frequencies(d_head, length)
        turns = self.training_length * fast / (2 * math.pi)
        low = self.low_freq_factor
        high = self.high_freq_factor
        weight_of_fast = ((turns - low) / (high - low)).clamp(0, 1)
        return weight_of_fast * fast + (1 - weight_of_fast) * fast / self.factor


class YaRN(RoPE):
    """YaRN (arXiv 2309.00071): pairs of few turns over T_train turn slower, scores are larger.

    Pairs up to the pair of beta_fast turns keep their frequency. Pairs from the pair of beta_slow
    turns on are slower by `factor`. Between the two the frequency is interpolated by the pair's
    number.

    Args:
        factor: At least 1.
        training_length: T_train, tokens of a training sequence before the model was stretched.
        attention_factor: The rotated dimensions of queries and keys are multiplied by it. None for
            0.1·ln(factor) + 1.
        beta_fast: In turns.
        beta_slow: In turns, less than beta_fast.
        truncate: Round the numbers of these two pairs outwards to whole numbers, as most models do.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(
        self,
        factor: float,
        training_length: int,
        attention_factor: float | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        **rope: Any,
    ) -> None:
        super().__init__(**rope)
        self.factor = factor
        self.training_length = training_length
        self.attention_factor = attention_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        _check_stretch(self)
        _check_order(self, "beta_slow", "beta_fast")
        if attention_factor is not None and attention_factor <= 0:
            raise ValueError(f"YaRN's attention_factor must be positive, not {attention_factor:g}")

    @property
    def scale(self) -> float:
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1
        return self.attention_factor

    def frequencies(self, d_head: int, length: int) -> Tensor:
        fast = super().frequencies(d_head, length)
        n_pairs = len(fast)
        low = self._pair_of_turns(self.beta_fast, n_pairs)
        high = self._pair_of_turns(self.beta_slow, n_pairs)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, 2 * n_pairs - 1)
        if low == high:
            high += 0.001  # as transformers does
        pairs = torch.arange(n_pairs, dtype=torch.float64)
        weight_of_slow = ((pairs - low) / (high - low)).clamp(0, 1)
        return (1 - weight_of_slow) * fast + weight_of_slow * fast / self.factor

    def _pair_of_turns(self, turns: float, n_pairs: int) -> float:
        """The number of the pair, with fractions, that makes `turns` turns over T_train tokens."""
        return (
            n_pairs * math.log(self.training_length / (2 * math.pi * turns)) / math.log(self.base)
        )


def _check_stretch(positions: Any) -> None:
    """Raise ValueError unless factor and training length, if there are any, are at least 1."""
    for name in ("factor", "training_length"):
        value = getattr(positions, name, None)
        if value is not None and not 1 <= value < math.inf:
            kind = type(positions).__name__
            raise ValueError(f"{kind}'s {name} must be at least 1, not {value:g}")


def _check_order(positions: Any, low_name: str, high_name: str) -> None:
    """Raise ValueError unless 0 < low < high."""
    low = getattr(positions, low_name)
    high = getattr(positions, high_name)
    if not 0 < low < high:
        kind = type(positions).__name__
        raise ValueError(
            f"{kind}'s {low_name} must be positive and less than {high_name}, "
            f"not {low:g} and {high:g}"
        )


class PRoPE(Positions):
    """p-RoPE as in [SI] (arXiv 2505.17083): half of the pairs have frequency 0, as in NoPE.

    Args:
        base: The d_head/4 rotating pairs turn by base^(−i/(d_head/4 − 1)), i = 0 … d_head/4 − 1,
            radians per token.
    """

    def __init__(self, base: float = 1024.0) -> None:
        super().__init__()
        self.base = base
        _check_base(self, base)

    def check(self, d_head: int) -> None:
        if d_head % 4 or d_head < 8:
            raise ValueError(
                "PRoPE needs a d_head (default d_model/n_heads) that is a multiple of 4 and at "
                f"least 8, not {d_head}"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        quarter = d_head // 4
        frequencies = self.base ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
        return torch.cat((frequencies, torch.zeros(quarter, dtype=torch.float64)))


class NoPE(Positions):
    """No positions: order enters through the causal mask alone (arXiv 2305.19466)."""

    def rotation(
        self, d_head: int, length: int, index: Tensor | None, like: Tensor
    ) -> Rotation | None:
        return None


class PositionsPattern(Positions):
    """Different positions in different layers: layer l (from 0) has `layers[l mod len(layers)]`.

    An entry counts its layers from 0. So a pattern inside a pattern has its entries in turn.

    Args:
        layers: The positions of each layer in the period, such as three times RoPE and then NoPE.
    """

    def __init__(self, layers: Sequence[Positions]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("PositionsPattern's layers must name at least one kind of positions")
        self.layers = list(layers)

    def check(self, d_head: int) -> None:
        for positions in self.layers:
            positions.check(d_head)

    def for_context(self, context_length: int) -> Positions:
        return PositionsPattern(
            [positions.for_context(context_length) for positions in self.layers]
        )

    def for_layer(self, layer: int) -> Positions:
        turn, entry = divmod(layer, len(self.layers))
        return self.layers[entry].for_layer(turn)
