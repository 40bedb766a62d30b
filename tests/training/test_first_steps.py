"""The first steps of a deep anGPT, whose MLPs square the length of a state that is too long."""

from functools import partial

import torch

from anlit import AdamW, AnGPT
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import tiny

SIZE = {"vocab_size": 256, "context_length": 32, "n_layers": 24, "d_model": 64}
SEED = 3
"""Of seeds 0 to 3 the one of the longest states with the larger α."""


def test_states_of_a_deep_angpt_stay_short_at_its_default_rate() -> None:
    """The length of a state is about 1 before the first step."""
    assert longest_state(alpha_init=None) < 5
    assert longest_state(alpha_init=1 / SIZE["n_layers"]) > 50


def longest_state(alpha_init: float | None) -> float:
    """The largest norm of a token's last state in five steps on tokens of Zipf's frequencies."""
    model = tiny(
        AnGPT,
        seed=SEED,
        alpha_init=alpha_init,
        s_z_init=None,
        optimizer=partial(AdamW, lr=None, weight_decay=0.0),
        **SIZE,
    )
    optimizer = model.make_optimizer(parameter_groups(model.model))
    frequencies = 1 / torch.arange(1, SIZE["vocab_size"] + 1)
    generator = torch.Generator().manual_seed(SEED)
    norms: list[float] = []

    def record_norm(block: torch.nn.Module, arguments: object, h: torch.Tensor) -> None:
        norms.append(h.detach().norm(dim=-1).max().item())

    model.model.blocks[-1].register_forward_hook(record_norm)

    for _ in range(5):
        tokens = torch.multinomial(frequencies, 8 * 33, replacement=True, generator=generator)
        tokens = tokens.view(8, 33)
        optimizer.zero_grad()
        _, objective = model.model(tokens[:, :-1], targets=tokens[:, 1:])
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.model.restore_norms()
    return max(norms)
