"""Different attention in different layers, such as three local layers and a global one in turn."""

from collections.abc import Sequence

from anlit.nn.mechanisms.mechanism import Mechanism


class AttentionPattern(Mechanism):
    """Layer number l (from 0) has the mechanism `layers[l mod len(layers)]`.

    An entry counts its layers from 0. So a pattern inside a pattern has its entries in turn.
    `PositionsPattern` does the same for positions. If an entry learns a coefficient globally, the
    layers of the entry share it.

    Args:
        layers: The mechanism of each layer in the period.
    """

    def __init__(self, layers: Sequence[Mechanism]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("AttentionPattern's layers must name at least one mechanism")
        self.layers = list(layers)

    def for_layer(self, n_heads: int, d_head: int, layer: int) -> Mechanism:
        turn, entry = divmod(layer, len(self.layers))
        return self.layers[entry].for_layer(n_heads, d_head, turn)
