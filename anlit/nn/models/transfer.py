"""Transfer over size: the rate that is best for a small model, carried over to a larger model.

The rate is tuned at a base size, `base_d_model` and `base_n_layers`. m = d_model / base_d_model and
l = n_layers / base_n_layers say how much larger a model is. The tables give the powers of m and l
in each group's rate. They give the powers in AdamW's ε too. At the base size all factors are 1.

GPT+: µP over width (arXiv 2203.03466), CompleteP with α = 1 over depth (arXiv 2505.01618). Both
multiply activations: the logits by 1/m, the branches of h by 1/l. Here initial values and rates
have these factors instead. For Adam this is the same: W with the rate c·η learns as c·V does, where
V has the rate η. W must begin as c·V. So only initial values and rates depend on the base.
`GPTDecoder.draw` has the initial values. ε follows the size of the gradient. EleutherAI's
nanoGPT-mup has 1/(m l) for all groups. Here embedding and head have no 1/l, because it is a
branch's.

nGPT, anGPT: the exponents of νGPT (arXiv 2604.27077). Two public descriptions report its table. We
could read the paper's abstract only. A row of norm 1 has entries of size 1/√d. Adam turns it by
about rate·√d. So the embedding takes m^-1/2. If all terms add up, a matrix changes its product with
a fixed h by rate·√d at most. The product's entries are of size 1/√d: m^-1. If terms add up as
random ones do, it is m^-1/2. νGPT takes the middle, m^-3/4. `NormalisedConfig` has the rule for α,
s_z and the scales of the vectors. anGPT has the same rows and products. So we give it the same
powers. We know of no publication.

The width does not change the spectral norm of Muon's update (`original`), or the norm grows with √m
(`match_rms_adamw`). Its rate takes m^0 or m^-1/2, in all architectures. This is our derivation.

The rules expect that d_ff and n_heads grow with d_model, and d_head stays. QK-norm then bounds the
attention scores at all widths. So they keep 1/√D.
"""

from dataclasses import dataclass

from anlit.errors import UserError


@dataclass(frozen=True)
class Powers:
    """m^width · l^depth."""

    width: float = 0.0
    depth: float = 0.0


CONSTANT = Powers()
RESIDUAL_MATRICES = "residual_matrices"
"""The group of W_o and W_d, if depth changes their rate."""


@dataclass(frozen=True)
class Rule:
    """How the settings of a group depend on the size.

    Args:
        rate: Of the rate of Adam, and of other optimizers that normalise each entry's step.
        epsilon: Of Adam's ε, by the size of the gradient.
    """

    rate: Powers = CONSTANT
    epsilon: Powers = CONSTANT


MUP = {
    "embedding": Rule(CONSTANT, Powers(width=-1)),
    "matrices": Rule(Powers(width=-1), Powers(width=-1, depth=-1)),
    RESIDUAL_MATRICES: Rule(Powers(width=-1, depth=-1), Powers(width=-1)),
    "head": Rule(Powers(width=-1), CONSTANT),
    "vectors": Rule(CONSTANT, Powers(width=-1, depth=-1)),
}
"""GPT+."""
NU_GPT = {
    "embedding": Rule(Powers(width=-1 / 2)),
    "matrices": Rule(Powers(width=-3 / 4)),
    "head": Rule(Powers(width=-3 / 4)),
    "vectors": Rule(),
}
"""nGPT and anGPT. Over depth α is 1/l of the base's, and no rate changes."""
MUON_WIDTH = {"match_rms_adamw": -1 / 2}
"""`adjust_lr_fn` of Muon → the power of m in its rate, if it is not 0."""


@dataclass(frozen=True)
class Transfer:
    """The factors of a model that is m times as wide and l times as deep as its base.

    Args:
        rules: The rule of each group.
        width: m.
        depth: l.
        base_d_model: The base's width. None if the width is not transferred.
        base_n_layers: The base's depth. None if the depth is not transferred.

    Raises:
        UserError: There is a base, and the architecture has no rules.
    """

    rules: dict[str, Rule]
    width: float = 1.0
    depth: float = 1.0
    base_d_model: int | None = None
    base_n_layers: int | None = None

    def __post_init__(self) -> None:
        if self.has_base and not self.rules:
            raise UserError(
                "model.base_d_model and base_n_layers need the decoder's transfer_rules, and it "
                "has none: leave them out"
            )

    @property
    def has_base(self) -> bool:
        return self.base_d_model is not None or self.base_n_layers is not None

    @property
    def splits_residual(self) -> bool:
        """Whether W_o and W_d are a group of their own."""
        return RESIDUAL_MATRICES in self.rules and self.base_n_layers is not None

    def rate_factor(self, group: str) -> float:
        """The factor of a group's rate in Adam."""
        return self._power(self.rules[group].rate)

    def muon_rate_factor(self, group: str, adjust_lr_fn: str | None) -> float:
        """The factor of a group's rate in Muon."""
        width = MUON_WIDTH.get(adjust_lr_fn or "original", 0.0)
        return self._power(Powers(width, self.rules[group].rate.depth))

    def epsilon_factor(self, group: str) -> float:
        """The factor of Adam's ε in a group."""
        return self._power(self.rules[group].epsilon)

    def _power(self, powers: Powers) -> float:
        return float(self.width**powers.width * self.depth**powers.depth)
