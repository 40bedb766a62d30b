"""The base class of attention mechanisms.

With q and k of unit root mean square, S_ij = q_i·k_j/√d_head has variance about 1. Every mechanism
here has logits

    L_ij = a(i−j) · g(n_i) · S_ij + m(i−j)        over the keys j that query i may see,

where n_i is the number of these keys and t = i − j the distance. A mechanism is three small
functions, and may have a window. To add a mechanism, write a subclass with the functions that are
not trivial. Write a YAML file that names it.
"""

import copy

from torch import Tensor, nn

from anlit.nn.mechanisms.coefficient import Coefficient, Reference


class Mechanism(nn.Module):
    """Base class: a(t) = 1, g(n) = 1, m(t) = 0.

    A function that returns None is trivial and costs nothing. A subclass's functions decide which
    kernels can compute it.

    The object that a user makes is a template. `for_layer` makes from it the module of one layer,
    with `n_heads` and `d_head`. A number that may be learned is a `Coefficient`; call it for its
    value.
    """

    window: int | None = None
    """How many keys a query may see. None for all earlier keys of its document."""

    replaces_positions = False
    """Whether it is published for use without positions."""

    n_heads: int
    """H, in the module of a layer."""

    d_head: int
    """D, in the module of a layer."""

    @property
    def scales_with_distance(self) -> bool:
        """Whether it overrides `distance_gain`, a(t).

        Many kernels cannot multiply single logits.
        """
        return getattr(self.distance_gain, "__func__", None) is not Mechanism.distance_gain

    @property
    def shifts_with_distance(self) -> bool:
        """Whether it overrides `distance_bias`, m(t)."""
        return getattr(self.distance_bias, "__func__", None) is not Mechanism.distance_bias

    @property
    def depends_on_distance(self) -> bool:
        """Whether logits change by distance in any way: by a(t), m(t) or a window."""
        return self.scales_with_distance or self.shifts_with_distance or self.window is not None

    def for_layer(self, n_heads: int, d_head: int, layer: int) -> "Mechanism":
        """The mechanism of layer number `layer`, from 0: a copy with separate learned coefficients.

        Raises:
            ValueError: It cannot work at this d_head or with the mechanisms inside, see `check`.
        """
        mechanism = copy.deepcopy(self)
        mechanism.n_heads = n_heads
        mechanism.d_head = d_head
        for name, child in self.named_children():
            if isinstance(child, Coefficient):
                setattr(mechanism, name, child.for_layer(n_heads))
            elif isinstance(child, Mechanism):
                setattr(mechanism, name, child.for_layer(n_heads, d_head, layer))
        mechanism.check()
        return mechanism

    def check(self) -> None:
        """Raise ValueError if the mechanism of a layer cannot work at its d_head or as composed.

        If the template has a pattern inside, the layer has an entry of the pattern.
        """

    def gain(self, n: Tensor) -> Tensor | None:
        """g(n): n of shape (B, 1, T), a float tensor of counts ≥ 1 → broadcastable to (B, H, T)."""
        return None

    def distance_gain(self, t: Tensor) -> Tensor | None:
        """a(t): t of shape (T,), a float tensor 0, 1, 2 … → (T,) or (H or 1, T)."""
        return None

    def distance_bias(self, t: Tensor) -> Tensor | None:
        """m(t): t of shape (T,), a float tensor 0, 1, 2 … → (T,) or (H or 1, T)."""
        return None


class MechanismWrapper(Mechanism):
    """A mechanism with another inside: it has the other's functions, unless it overrides them."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        if type(self) is MechanismWrapper:
            raise ValueError(
                "MechanismWrapper is not a mechanism by itself: choose the mechanism inside of it"
            )
        self.mechanism = mechanism

    @property
    def scales_with_distance(self) -> bool:
        return self.mechanism.scales_with_distance

    @property
    def shifts_with_distance(self) -> bool:
        return self.mechanism.shifts_with_distance

    def gain(self, n: Tensor) -> Tensor | None:
        return self.mechanism.gain(n)

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return self.mechanism.distance_gain(t)

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return self.mechanism.distance_bias(t)


def mechanism_name(mechanism: Mechanism) -> str:
    """The class, the window and learned coefficients: `SlidingWindow(window 128, Plain)`.

    The values of coefficients are left out, because no kernel's speed depends on them.
    """
    details = [] if mechanism.window is None else [f"window {mechanism.window}"]
    for name, child in mechanism.named_children():
        coefficient = child.coefficient if isinstance(child, Reference) else child
        if isinstance(child, Mechanism):
            details.append(mechanism_name(child))
        elif isinstance(coefficient, Coefficient) and coefficient.learned != "never":
            details.append(f"{name} {coefficient.learned}")
    label = type(mechanism).__name__
    return f"{label}({', '.join(details)})" if details else label
